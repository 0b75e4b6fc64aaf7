"""Records the events and instructions of a live state machine, and replays them on a fresh one.

Two machines are logged: the ``ReplicaScheduler`` of each replica, and in batch mode the ``BatchScheduler`` over them. A
log is a sequence of msgpack records: first the schema version and the configuration that the machine was built from,
then for each event its instant, the event, the instructions that the machine returned, and the serving times that the
machine asked for (only ``BatchScheduler`` asks). A decision depends on nothing else, so the same events give the same
instructions, wherever and whenever they are replayed.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from farsight.core.codec import decode, encode
from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.errors import IntegrityError, MessageError
from farsight.policies.compose import configured_batch_scheduler, configured_replica
from farsight.policies.fleet.events import GlobalEvent, GlobalInstruction
from farsight.policies.replica.events import Event, Instruction

SCHEMA_VERSION = 2
"""Version of the records, raised with every change of their form. Logs of version 1 do not state their version."""

BatchShape = tuple[int, int, int]
"""Jobs, prompt tokens and output tokens of a batch."""


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """Everything that determines the machine of a replica: equal configurations build equal machines."""

    scheduler: SchedulerConfig
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class BatchMachineConfig:
    """Everything that determines the machine of batch mode: equal configurations build equal machines."""

    scheduler: SchedulerConfig
    batch: BatchConfig
    max_num_seqs: int
    forecast_wait_s: float


@dataclass(frozen=True, slots=True)
class Handled:
    """One event, its instant, and the instructions that the machine returned.

    Attributes:
        estimates_s: Estimated seconds of the batches that the machine asked about.
    """

    event: Any
    now: float
    instructions: tuple[Any, ...]
    estimates_s: dict[BatchShape, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event to which the replayed machine answers differently from the logged one.

    Attributes:
        index: Index of the event, from 0.
        unlogged: A batch whose serving time only the replayed machine asks for; ``replayed`` is then empty.
    """

    index: int
    event: Any
    logged: tuple[Any, ...]
    replayed: tuple[Any, ...]
    unlogged: BatchShape | None = None


def _kinds(union: Any) -> dict[str, type]:
    return {kind.__name__: kind for kind in typing.get_args(union)}


_CONFIGS: dict[str, type] = {kind.__name__: kind for kind in (MachineConfig, BatchMachineConfig)}
_VOCABULARY: dict[type, tuple[dict[str, type], dict[str, type]]] = {
    MachineConfig: (_kinds(Event), _kinds(Instruction)),
    BatchMachineConfig: (_kinds(GlobalEvent), _kinds(GlobalInstruction)),
}
"""The events and the instructions of each machine, by the class of its configuration."""


def pack_config(config: MachineConfig | BatchMachineConfig) -> bytes:
    """Returns the first record of a log."""
    return _pack([SCHEMA_VERSION, _message(config)])


def pack_handled(
    event: Any, now: float, instructions: Iterable[Any], estimates_s: Mapping[BatchShape, float] | None = None
) -> bytes:
    """Returns one event's record; ``estimates_s``: estimated seconds of the batches that the machine asked about."""
    answers = [[*shape, float(estimate_s)] for shape, estimate_s in (estimates_s or {}).items()]
    return _pack([now, _message(event), [_message(each) for each in instructions], answers])


def read_log(data: bytes) -> tuple[MachineConfig | BatchMachineConfig, Iterator[Handled]]:
    """Returns the configuration and the events of a log. A last record that is cut off (killed writer) is left out.

    Raises:
        MessageError: The data is no event log of this version; also raised while the events are read.
    """
    records = _records(data)
    head = next(records, None)
    if isinstance(head, list) and len(head) == 1:
        head = [1, *head]
    if not isinstance(head, list) or len(head) != 2 or type(head[0]) is not int:
        raise MessageError("event log", data[:40], "a schema version and the configuration of a machine first")
    if head[0] != SCHEMA_VERSION:
        expected = f"{SCHEMA_VERSION}; replay this log with the version of farsight that wrote it"
        raise MessageError("event log schema version", head[0], expected)
    config = _read(head[1], _CONFIGS)
    events, instructions = _VOCABULARY[type(config)]
    return config, (_handled(record, events, instructions) for record in records)


def replay(data: bytes) -> tuple[int, Difference | None]:
    """Replays a log on a new machine; returns the number of replayed events and the first difference, if any.

    Raises:
        MessageError: As in ``read_log``.
    """
    config, events = read_log(data)
    times = _LoggedTimes()
    handle = _fresh_machine(config, times)
    count = 0
    for count, each in enumerate(events, 1):
        times.known = each.estimates_s
        try:
            found = tuple(handle(each.event, each.now))
        except _UnloggedError as error:
            return count, Difference(count - 1, each.event, each.instructions, (), error.shape)
        if found != each.instructions:
            return count, Difference(count - 1, each.event, each.instructions, found)
    return count, None


def _fresh_machine(
    config: MachineConfig | BatchMachineConfig, times: _LoggedTimes
) -> Callable[[Any, float], list[Any]]:
    if isinstance(config, MachineConfig):
        return configured_replica(config.scheduler, config.max_num_seqs).handle
    own = config.scheduler, config.batch, config.max_num_seqs
    return configured_batch_scheduler(*own, times, config.forecast_wait_s).handle


class _UnloggedError(IntegrityError):
    """A machine asks for a serving time that the log does not hold."""

    def __init__(self, shape: BatchShape) -> None:
        super().__init__(f"the log holds no serving time of a batch of {shape}")
        self.shape = shape


class _LoggedTimes:
    """The serving times that the logged machine was given when it handled the same event."""

    def __init__(self) -> None:
        self.known: dict[BatchShape, float] = {}

    def __call__(self, num_jobs: int, prompt_len: int, output_len: int) -> float:
        shape = num_jobs, prompt_len, output_len
        if shape not in self.known:
            raise _UnloggedError(shape)
        return self.known[shape]


def _records(data: bytes) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data)
    try:
        yield from unpacker
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise MessageError("event log", data[:40], f"msgpack records ({error})") from error


def _handled(record: Any, events: dict[str, type], instructions: dict[str, type]) -> Handled:
    whole = isinstance(record, list) and [type(each) for each in record] == [float, list, list, list]
    if not whole:
        raise MessageError("event log record", record, "an instant, an event, its instructions and serving times")
    now, event, answers, estimates = record
    return Handled(
        _read(event, events), now, tuple(_read(each, instructions) for each in answers), dict(map(_estimate, estimates))
    )


def _estimate(row: Any) -> tuple[BatchShape, float]:
    if not isinstance(row, list) or [type(each) for each in row] != [int, int, int, float]:
        raise MessageError("event log serving time", row, "jobs, prompt tokens, output tokens and seconds of a batch")
    return (row[0], row[1], row[2]), row[3]


def _message(message: Any) -> list[Any]:
    return [type(message).__name__, encode(message)]


def _read(pair: Any, kinds: dict[str, type]) -> Any:
    if not isinstance(pair, list) or [type(each) for each in pair] != [str, bytes] or pair[0] not in kinds:
        raise MessageError("event log record", pair, f"one of {', '.join(kinds)}")
    return decode(pair[1], kinds[pair[0]])


def _pack(record: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(record)
    return packed
