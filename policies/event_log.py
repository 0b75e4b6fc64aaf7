"""What a replica's state machine has heard and answered, so that it can be told again to a fresh one.

A log is msgpack records, one after the other: first the configuration that the machine was built from, then for each
event its instant, the event and the instructions that came out. Nothing else goes into a decision, so the same events
give the same instructions, wherever and whenever they are told again.
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
    """What a machine is built from: the same, the same machine."""

    scheduler: SchedulerConfig
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Handled:
    """One event, when it came, and what came out."""

    event: Event
    now: float
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a machine that is told the same answers otherwise; ``index`` counts events from 0."""

    index: int
    event: Event
    logged: tuple[Instruction, ...]
    replayed: tuple[Instruction, ...]


def pack_config(config: MachineConfig) -> bytes:
    """The beginning of a log."""
    return _pack([_message(config)])


def pack_handled(event: Event, now: float, instructions: Iterable[Instruction]) -> bytes:
    """One record."""
    return _pack([now, _message(event), [_message(each) for each in instructions]])


def read_log(data: bytes) -> tuple[MachineConfig, Iterator[Handled]]:
    """The configuration and the events of a log. A last record that is cut off, as by a killed writer, is left out.

    Raises:
        MessageError: it is no event log of this version, now or as the events are read.
    """
    records = _records(data)
    head = next(records, None)
    if not isinstance(head, list) or len(head) != 1:
        raise MessageError("event log", data[:40], "the configuration of a machine first")
    return _read(head[0], {MachineConfig.__name__: MachineConfig}), map(_handled, records)


def replay(data: bytes) -> tuple[int, Difference | None]:
    """Tells a fresh machine what is logged: how many events it was told, and the first that it answers otherwise.

    Raises:
        MessageError: as of ``read_log``.
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
