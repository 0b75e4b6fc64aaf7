"""Conversations replayed under virtual time with tiers of KV memory, beside one tier and beside a memory without end.

The replicas are those of a server: ``ReplicaScheduler``, ``LeaseExecutor`` and the tiers decide as they do there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.simulator.cluster.fleet import Fleet
from farsight.simulator.cluster.memory_below import NOTHING_BELOW, MemoryBelow
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.tiered import TieredReplica
from farsight.simulator.experiment import Experiment
from farsight.simulator.run import run_source
from farsight.simulator.summary import MeanAndPercentiles, distribution
from farsight.simulator.traffic.conversations import ClosedLoop, Trace, is_conversations, read_conversations
from farsight.simulator.traffic.prefixes import mooncake_blocks
from farsight.simulator.traffic.traces import read_rows, read_trace
from farsight.simulator.traffic.workload import SimRequest, Source

BLOCK_SIZE = 64
"""Tokens of a KV block where the trace does not say."""

KV_BLOCK = 256
"""Tokens of a KV block for conversations, whose own blocks are joined: a server's are 64, and a run takes four times as
long with these; a turn then computes about 100 tokens less, in all runs alike."""

ONE_TIER, TIERS, ALL_KEPT = "one tier", "tiers", "all kept"
"""The runs: the device's pool alone; the tiers below it as well; nothing is ever evicted, which is the bound."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """All that determines a replay.

    Attributes:
        every_s: Seconds between the begins of two conversations.
        below: The tiers below the device's pool.
        experiment: Preset, prices, ``kv_tokens`` of the device's pool, and limits of a step.
    """

    experiment: Experiment
    below: MemoryBelow
    every_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.every_s < float("inf"):
            raise InvalidValueError("every", self.every_s, "seconds >= 0")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The numbers of one run.

    Attributes:
        computed_tokens: Prompt tokens computed, those that preemptions made to be computed again included.
        new_tokens: Prompt tokens behind what an earlier turn of the conversation had.
        hits: Prompt tokens found in, or brought back from, each tier.
        turn_s, first_token_s: Over turns; ``by_class`` are turns of each class.
        turn_percentiles_s: Percentiles 1 to 99 of ``turn_s``; empty where no turn has ended.
        program_s: Over sessions: seconds in the model, tools and people left out.
        written_bytes: Bytes written to disk.
        num_refused: Turns that no replica could hold.
    """

    name: str
    turns: int
    sessions: int
    prompt_tokens: int
    new_tokens: int
    computed_tokens: int
    output_tokens: int
    hits: dict[str, int]
    turn_s: MeanAndPercentiles
    turn_percentiles_s: tuple[float, ...]
    first_token_s: MeanAndPercentiles
    program_s: MeanAndPercentiles
    by_class: dict[str, ClassResult]
    written_bytes: int
    num_refused: int
    makespan_s: float
    busy_share: float

    @property
    def computed_again(self) -> int:
        """Prompt tokens computed although an earlier turn had them."""
        return max(0, self.computed_tokens - self.new_tokens)


@dataclass(frozen=True, slots=True)
class ClassResult:
    """The turns of one class."""

    turns: int
    turn_s: MeanAndPercentiles
    first_token_s: MeanAndPercentiles


@dataclass(frozen=True, slots=True)
class ReplayTraffic:
    """What is replayed.

    Attributes:
        begin: Makes the requests again for each run, from the seconds between two conversations.
        num_turns: Turns of all of them.
        every_token: A pool of so many tokens holds all prompts and outputs together.
        num_left_out: Turns of subagents, which are not replayed.
    """

    begin: Callable[[float], Iterable[SimRequest] | Source]
    num_turns: int
    max_new_tokens: int
    block_size: int
    every_token: int
    num_left_out: int = 0
    is_closed: bool = False


def read_traffic(path: Path, part: int, num_parts: int, scale: float) -> ReplayTraffic:
    """Reads conversations, or a trace of single requests in any format of ``read_trace``.

    Args:
        part, num_parts: Which of so many equal parts of the conversations, from 1.
        scale: Tokens of a conversation are this share of the file's.

    Raises:
        TraceError: The file cannot be used.
        InvalidValueError: A part or a scale that does not go with it.
    """
    if is_conversations(next(read_rows(path))):
        trace = read_conversations(path, part, num_parts)
        return of_conversations(replace(trace, joined=max(1, KV_BLOCK // trace.block_size)).scaled(scale))
    for name, value, usual in (("part", f"{part}/{num_parts}", "1/1"), ("scale", scale, 1.0)):
        if value != usual:
            raise InvalidValueError(name, value, f"{usual} for a trace of single requests, which has no conversations")
    arrivals = read_trace(path)
    if any(each.prefix for each in arrivals):
        arrivals = mooncake_blocks(arrivals, BLOCK_SIZE)
    arrivals = [replace(each, app="request") for each in arrivals]
    ends = sum(each.prompt_len + each.output_len + 2 * BLOCK_SIZE for each in arrivals)
    limit = max(each.max_new_tokens for each in arrivals)
    return ReplayTraffic(lambda _: arrivals, len(arrivals), limit, BLOCK_SIZE, ends)


def of_conversations(trace: Trace) -> ReplayTraffic:
    """Returns the conversations as traffic."""

    def begin(every_s: float) -> ClosedLoop:
        return ClosedLoop(trace, (index * every_s for index in range(len(trace.conversations))))

    turns = [turn for each in trace.conversations for turn in each.turns]
    return ReplayTraffic(
        begin,
        num_turns=len(turns),
        max_new_tokens=max(turn.output_len for turn in turns),
        block_size=trace.kv_block_size,
        every_token=_every_token(trace),
        num_left_out=trace.num_left_out,
        is_closed=True,
    )


def _every_token(trace: Trace) -> int:
    size, blocks = trace.kv_block_size, 0
    for conversation in trace.conversations:
        ids = set(itertools.chain.from_iterable(range(a, a + n) for turn in conversation.turns for a, n in turn.blocks))
        blocks += len(ids) // trace.joined + sum(turn.output_len // size + 2 for turn in conversation.turns)
    longest = max(turn.prompt_len + turn.output_len for each in trace.conversations for turn in each.turns)
    return (blocks + longest // size + 1) * size


def replay(
    settings: ReplaySettings,
    traffic: ReplayTraffic,
    names: Sequence[str] = (ONE_TIER, TIERS, ALL_KEPT),
    progress: Callable[[str, int], None] = lambda name, num: None,
) -> list[ReplayResult]:
    """Runs the traffic with one tier, with the tiers below it, and with all kept; returns the results of ``names``.

    Args:
        progress: Called with the name of a run and the number of turns that have ended in it.
    """
    own = replace(settings.experiment, block_size=traffic.block_size)
    results = []
    for name in names:
        experiment = replace(own, kv_tokens=max(own.kv_tokens, traffic.every_token)) if name == ALL_KEPT else own
        below = settings.below if name == TIERS else NOTHING_BELOW
        source = traffic.begin(settings.every_s)
        fleet = run_source(
            experiment, source, traffic.max_new_tokens, below=below, progress=functools.partial(progress, name)
        )
        results.append(_result(name, fleet))
    return results


def _result(name: str, fleet: Fleet) -> ReplayResult:
    recorder, sessions = fleet.recorder, fleet.sessions
    assert sessions is not None
    done, usage = recorder.done, list(recorder.usage.values())
    totals = sessions.totals()
    tiered = [each for each in fleet.replicas if isinstance(each, TieredReplica)]
    restored = {tier: sum(each.restored_tokens[tier] for each in tiered) for tier in ("host", "disk")}
    cached = sum(each.cached_len for each in done)
    makespan_s = max((each.finished_at for each in done), default=0.0)
    by_kind: dict[str, list[Record]] = {}
    for record in done:
        by_kind.setdefault(record.arrival.app, []).append(record)
    return ReplayResult(
        name=name,
        turns=len(done),
        sessions=totals.sessions,
        prompt_tokens=totals.prompt_tokens,
        new_tokens=totals.new_tokens,
        computed_tokens=sum(each.num_prompt_tokens for each in usage),
        output_tokens=totals.output_tokens,
        hits={"device": max(0, cached - sum(restored.values())), **restored},
        turn_s=distribution([each.jct_s for each in done]),
        turn_percentiles_s=_percentiles([each.jct_s for each in done]),
        first_token_s=distribution([each.ttft_s for each in done]),
        program_s=distribution([row.counts.in_model_s for row in sessions.rows()]),
        by_class={kind: _class(records) for kind, records in sorted(by_kind.items())},
        written_bytes=sum(each.written_bytes for each in tiered),
        num_refused=len(fleet.refused),
        makespan_s=makespan_s,
        busy_share=sum(each.busy_s for each in usage) / makespan_s / len(usage) if makespan_s else 0.0,
    )


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    if not values:
        return ()
    found = np.percentile(np.asarray(values), np.arange(1, 100), method="inverted_cdf")
    return tuple(map(float, found))


def _class(records: Sequence[Record]) -> ClassResult:
    turn_s = distribution([each.jct_s for each in records])
    return ClassResult(len(records), turn_s, distribution([each.ttft_s for each in records]))


def to_dict(settings: ReplaySettings, traffic: ReplayTraffic, results: Iterable[ReplayResult]) -> dict[str, Any]:
    """Returns what ``--json`` prints: the settings, each run, and the ratios that matter."""
    runs = {each.name: each for each in results}
    return {
        "settings": dataclasses.asdict(settings),
        "turns_of_subagents_left_out": traffic.num_left_out,
        "runs": [dataclasses.asdict(each) | {"computed_again_tokens": each.computed_again} for each in runs.values()],
        "ratios": ratios(runs),
    }


def ratios(runs: dict[str, ReplayResult]) -> dict[str, float | None]:
    """Returns the tiers' prefill over new tokens, and their times over those of one tier and of the bound."""
    one, tiers, kept = runs[ONE_TIER], runs[TIERS], runs[ALL_KEPT]
    return {
        "computed_to_new": _over(tiers.computed_tokens, tiers.new_tokens),
        "one_tier_computed_to_new": _over(one.computed_tokens, one.new_tokens),
        "turn_mean_to_all_kept": _over(tiers.turn_s.mean, kept.turn_s.mean),
        "turn_p99_to_all_kept": _over(tiers.turn_s.p99, kept.turn_s.p99),
        "turn_mean_to_one_tier": _over(tiers.turn_s.mean, one.turn_s.mean),
        "turn_p99_to_one_tier": _over(tiers.turn_s.p99, one.turn_s.p99),
        "program_mean_to_one_tier": _over(tiers.program_s.mean, one.program_s.mean),
    }


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
