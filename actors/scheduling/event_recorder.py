"""Records the events and instructions of a state machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from farsight.core.errors import ConfigError
from farsight.policies.event_log import BatchMachineConfig, BatchShape, MachineConfig, pack_config, pack_handled
from farsight.policies.settings import ServingTime

SUFFIX = ".events"


class EventRecorder:
    """One file for each life of a machine: ``DIR/scheduler-0-1700000000-4711.events`` (second, process).

    Each record is with the operating system before the next event is handled: the death of this process loses none.

    Raises:
        ConfigError: The directory cannot be written to.
    """

    def __init__(self, name: str, config: MachineConfig | BatchMachineConfig) -> None:
        directory = Path(config.scheduler.event_log)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.path = directory / f"{name}-{time.time_ns() // 10**9}-{os.getpid()}{SUFFIX}"
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            expected = f"a directory that can be written to ({error.strerror})"
            raise ConfigError("scheduler.event_log", config.scheduler.event_log, expected) from error
        self._file.write(pack_config(config))
        self._estimates: dict[BatchShape, float] = {}  # told to the machine since the last record

    def asking(self, serving_time_s: ServingTime) -> ServingTime:
        """Wraps ``serving_time_s`` for the machine: each estimate goes into the record of the event in hand."""

        def ask(num_jobs: int, prompt_len: int, output_len: int) -> float:
            estimate_s = serving_time_s(num_jobs, prompt_len, output_len)
            self._estimates[num_jobs, prompt_len, output_len] = estimate_s
            return estimate_s

        return ask

    def record(self, event: Any, now: float, instructions: Iterable[Any]) -> None:
        self._file.write(pack_handled(event, now, instructions, self._estimates))
        self._estimates.clear()

    def close(self) -> None:
        self._file.close()


EventT = TypeVar("EventT")
AnswerT = TypeVar("AnswerT")
Handle = Callable[[EventT, float], list[AnswerT]]


def recorded(handle: Handle[EventT, AnswerT], recorder: EventRecorder | None) -> Handle[EventT, AnswerT]:
    """Wraps a machine's ``handle`` so that each call is recorded; returns it as it is without a recorder."""
    if recorder is None:
        return handle

    def handle_and_record(event: EventT, now: float) -> list[AnswerT]:
        instructions = handle(event, now)
        recorder.record(event, now, instructions)
        return instructions

    return handle_and_record
