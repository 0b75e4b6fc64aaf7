"""What a worker asks of the device that computes its steps and moves its KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.sequence import Sequence
from engine.step_fault import StepFault
from kvcache import KVCopy, StepBatch


class Runner(Protocol):
    """Computes a step; the model runner, or a device emulated from a profile."""

    @property
    def num_ooms(self) -> int:
        """How often the device has run out of memory and computed a step in parts."""
        ...

    def begin(self, batch: StepBatch, sequences: dict[str, Sequence]) -> None:
        """Announces a step that will be executed after those that have begun before it."""
        ...

    def execute(self, batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]: ...

    def look_ahead(self, batch: StepBatch, sequences: dict[str, Sequence]) -> bool:
        """Gets a step ready that is likely to follow the one that computes; in another thread, meanwhile.

        Returns:
            Whether it could also be executed before that one is booked, after ``go_on``.
        """
        ...

    def go_on(self, batch: StepBatch, token_ids: list[int]) -> None:
        """Says the last known token of each item of a step that was got ready: its sequences lack them."""
        ...

    def fault(self, error: Exception) -> StepFault:
        """What the error of a failed ``execute`` says about the device."""
        ...

    def rest(self) -> None:
        """Announces that no step can run for now."""
        ...


class Copier(Protocol):
    """Moves KV between the device and the host while steps run."""

    def when_done(self, callback: Callable[[], object]) -> None: ...
    def begin(self, copy: KVCopy) -> None: ...
    def take_done(self) -> list[tuple[int, bool]]: ...
    def wait(self) -> None: ...
