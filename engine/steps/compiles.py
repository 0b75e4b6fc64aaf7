"""Counts the kernels that Triton compiles while a worker serves: each stops every stream, so there should be none."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


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
