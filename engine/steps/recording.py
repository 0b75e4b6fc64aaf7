"""What recorded steps of any kind share: memory that the host writes into, and what is left out of the recordings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], object]], Callable[[], None]]
"""Runs work and records it; returns a function that runs it again. Without a GPU: ``lambda run: run``. A recording
holds kernels and addresses only, so its owner keeps the work, and with it the memory that it reads."""

Size = TypeVar("Size")
Inputs = TypeVar("Inputs")


class Mirrored:
    """Memory of the device that the host fills, without waiting for the device.

    The host has two copies and writes them by turns: the device may not have fetched the other one yet.

    Attributes:
        there: ``[size]``, on the device; its address stays.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.there = torch.zeros(size, dtype=dtype, device=device)
        self._here = [torch.zeros(size, dtype=dtype, pin_memory=pinned) for _ in range(2)]

    def take(self) -> np.ndarray:
        """Returns the copy to write next, ``[size]``; it holds what was written two turns ago."""
        self._here.reverse()
        values: np.ndarray = self._here[0].numpy()
        return values

    def send(self, num: int | None = None) -> None:
        """Launches the copy to the device: of the first ``num`` elements, or of all."""
        self.there[:num].copy_(self._here[0][:num], non_blocking=True)


class Recorded(NamedTuple, Generic[Inputs]):
    """A step to be replayed.

    Attributes:
        work: The recorded work. Kept because it alone holds the constants that the kernels read.
    """

    inputs: Inputs
    work: Callable[[], object]
    replay: Callable[[], None]


class Recordings(Generic[Size, Inputs]):
    """Recorded steps by size."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._steps: dict[Size, Recorded[Inputs]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, size: Size) -> bool:
        return size in self._steps

    def __getitem__(self, size: Size) -> Recorded[Inputs]:
        return self._steps[size]

    @torch.inference_mode()
    def record(self, sizes: Iterable[Size], prepare: Callable[[Size], tuple[Inputs, Callable[[], object]]]) -> None:
        """Records sizes in their order; the largest come first, so that the others find room in its memory.

        A size that cannot be recorded is left out, and told of: its steps are computed operation by operation.

        Args:
            prepare: Makes the inputs of a size, and the work.
        """
        lacking, why = 0, ""
        for size in sizes:
            try:
                inputs, work = prepare(size)
                self._steps[size] = Recorded(inputs, work, self._capture(work))
            except RuntimeError as error:  # no memory, or an operation that cannot be recorded at this size
                lacking, why = lacking + 1, str(error)
        if lacking:
            total = lacking + len(self._steps)
            logger.warning("%d of %d sizes of steps are not recorded, and slower: %s", lacking, total, why)
