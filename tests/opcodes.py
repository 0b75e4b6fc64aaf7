"""Work counted in bytecodes, the same on every machine: for tests of what grows with what."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def num_opcodes(run: Callable[[], object]) -> int:
    """Bytecodes of Python functions that a call executes; what C code does inside one of them is not counted."""
    num = 0

    def trace(frame: FrameType, event: str, arg: object) -> TraceFunction:
        nonlocal num
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return num
