"""Writes down what a state machine hears and answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from core.config.scheduling import SchedulerConfig
from core.errors import ConfigError
from policies.event_log import MachineConfig, pack_config, pack_handled
from policies.replica.events import Event, Instruction

SUFFIX = ".events"


class EventRecorder:
    """One file for each life of a machine: ``DIR/scheduler-0-1700000000-4711.events`` (second, process).

    Each record is with the operating system before the next event is handled: the death of this process loses none.

    Raises:
        ConfigError: the directory cannot be written to.
    """

    def __init__(self, name: str, config: SchedulerConfig, max_num_seqs: int) -> None:
        directory = Path(config.event_log)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.path = directory / f"{name}-{time.time_ns() // 10**9}-{os.getpid()}{SUFFIX}"
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            expected = f"a directory that can be written to ({error.strerror})"
            raise ConfigError("scheduler.event_log", config.event_log, expected) from error
        self._file.write(pack_config(MachineConfig(config, max_num_seqs)))

    def record(self, event: Event, now: float, instructions: Iterable[Instruction]) -> None:
        self._file.write(pack_handled(event, now, instructions))

    def close(self) -> None:
        self._file.close()


Handle = Callable[[Event, float], list[Instruction]]


def recorded(handle: Handle, recorder: EventRecorder | None) -> Handle:
    """``handle`` of a machine, written down if there is a recorder."""
    if recorder is None:
        return handle

    def handle_and_record(event: Event, now: float) -> list[Instruction]:
        instructions = handle(event, now)
        recorder.record(event, now, instructions)
        return instructions

    return handle_and_record
