"""Kernels that Triton compiles: at the start side by side, and kept; later none, as each would stop every stream."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from farsight.engine.checkpoint.catalogue import cache_dir

logger = logging.getLogger(__name__)


def keep_compiled() -> None:
    """Keeps compiled kernels in ``kernels`` below ``FARSIGHT_CACHE``, unless ``TRITON_CACHE_DIR`` names a place."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "kernels"))


def compile_side_by_side(work: Callable[[], object], num_threads: int) -> int:
    """Compiles the kernels that work would launch, several at once; none is launched, so the work computes nothing.

    Returns:
        How many there are; none without Triton.
    """
    try:
        from triton import AsyncCompileMode, JITFunction, knobs
    except ImportError:
        return 0
    found: dict[tuple[Any, str], None] = {}

    def keep(*, fn: Any, compile: Any, **_: Any) -> bool:
        found[fn.jit_function, compile["specialization_data"]] = None
        return True  # it is not compiled now, and so not launched

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, keep
    try:
        work()
    finally:
        knobs.runtime.jit_cache_hook = before
    with ThreadPoolExecutor(num_threads, "kernels") as threads, _parsed_in_turn(JITFunction), AsyncCompileMode(threads):
        for kernel, data in found:
            kernel.preload(data)
    return len(found)


@contextmanager
def _parsed_in_turn(kind: Any) -> Iterator[None]:
    """Lets one thread at a time parse: in some versions of Python ``ast.parse`` raises where two threads call it."""
    parse, lock = kind.parse, threading.Lock()

    def locked(self: Any) -> Any:
        with lock:
            return parse(self)

    kind.parse = locked
    try:
        yield
    finally:
        kind.parse = parse


class CompileCounter:
    """Counts from ``begin`` on, in this process; what was compiled before belongs to the start.

    Attributes:
        names: The kernels compiled since, by name, in their order; also those that were found in the cache on disk.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    @property
    def num_compiles(self) -> int:
        """How many kernels were compiled since ``begin``."""
        return len(self.names)

    def begin(self) -> None:
        """Counts from now on, and tells of each. Without Triton nothing is ever compiled."""
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.runtime.jit_post_compile_hook = self._count

    def _count(self, *, fn: Any, repr: str, **_: Any) -> None:
        self.names.append(fn.name)
        logger.warning("a kernel was compiled while serving, which stops every stream: %s", repr)
