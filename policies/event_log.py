"""The event log of a replica's state machine, for replay on a new machine.

A log is a sequence of msgpack records: first the configuration that the machine was built from, then for each event
its instant, the event and the resulting instructions. Decisions depend on nothing else, so a replay of the same events
gives the same instructions.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from core.codec import decode, encode
from core.config.scheduling import SchedulerConfig
from core.errors import MessageError
from policies.compose import configured_replica
from policies.replica.events import Event, Instruction

_EVENTS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Event)}
_INSTRUCTIONS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Instruction)}


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """The configuration of a machine; equal configurations build equal machines."""

    scheduler: SchedulerConfig
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Handled:
    """One event, its instant, and the resulting instructions."""

    event: Event
    now: float
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event whose replay gives other instructions; ``index`` counts events from 0."""

    index: int
    event: Event
    logged: tuple[Instruction, ...]
    replayed: tuple[Instruction, ...]


def pack_config(config: MachineConfig) -> bytes:
    """The first record of a log."""
    return _pack([_message(config)])


def pack_handled(event: Event, now: float, instructions: Iterable[Instruction]) -> bytes:
    """One record of a log."""
    return _pack([now, _message(event), [_message(each) for each in instructions]])


def read_log(data: bytes) -> tuple[MachineConfig, Iterator[Handled]]:
    """The configuration and the events of a log. A truncated last record, left by a killed writer, is ignored.

    Raises:
        MessageError: The data is no event log of this version; also raised while the events are read.
    """
    records = _records(data)
    head = next(records, None)
    if not isinstance(head, list) or len(head) != 1:
        raise MessageError("event log", data[:40], "the configuration of a machine as first record")
    return _read(head[0], {MachineConfig.__name__: MachineConfig}), map(_handled, records)


def replay(data: bytes) -> tuple[int, Difference | None]:
    """Replays a log on a new machine; returns the number of replayed events and the first difference, if any.

    Raises:
        MessageError: As in ``read_log``.
    """
    config, events = read_log(data)
    machine = configured_replica(config.scheduler, config.max_num_seqs)
    count = 0
    for count, each in enumerate(events, 1):
        found = tuple(machine.handle(each.event, each.now))
        if found != each.instructions:
            return count, Difference(count - 1, each.event, each.instructions, found)
    return count, None


def _records(data: bytes) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data)
    try:
        yield from unpacker
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise MessageError("event log", data[:40], f"msgpack records ({error})") from error


def _handled(record: Any) -> Handled:
    if not isinstance(record, list) or len(record) != 3 or type(record[0]) is not float or type(record[2]) is not list:
        raise MessageError("event log record", record, "an instant, an event and its instructions")
    now, event, instructions = record
    return Handled(_read(event, _EVENTS), now, tuple(_read(each, _INSTRUCTIONS) for each in instructions))


def _message(message: Any) -> list[Any]:
    return [type(message).__name__, encode(message)]


def _read(pair: Any, kinds: dict[str, type]) -> Any:
    if not isinstance(pair, list) or len(pair) != 2 or pair[0] not in kinds or type(pair[1]) is not bytes:
        raise MessageError("event log record", pair, f"one of {', '.join(kinds)}")
    return decode(pair[1], kinds[pair[0]])


def _pack(record: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(record)
    return packed
