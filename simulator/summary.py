"""The summary of a run: latencies, goodput under an SLA, throughput, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from farsight.core.costs import attention_pairs
from farsight.core.errors import InvalidValueError
from farsight.simulator.cluster.latency import LatencyModel
from farsight.simulator.cluster.records import Record, Recorder
from farsight.simulator.cluster.replica import ReplicaShape

if TYPE_CHECKING:
    from rich.table import Table

Number = int | float | None
"""None if a run does not have the number, such as TPOT if no request has two tokens."""


@dataclass(frozen=True, slots=True)
class Sla:
    """The latency bounds of a good request; the limits are those of Past-Future for models up to 13B (section 5).

    Attributes:
        ttft_s: Longest time to its first token.
        mtpot_s: Longest gap between two of its tokens.
    """

    ttft_s: float = 10.0
    mtpot_s: float = 1.5

    def __post_init__(self) -> None:
        for name in ("ttft_s", "mtpot_s"):
            if not getattr(self, name) > 0:
                raise InvalidValueError(name, getattr(self, name), "seconds above 0")

    def meets(self, record: Record) -> bool:
        """Whether an ended request kept both bounds; a request of a single token has no gaps."""
        return record.ttft_s <= self.ttft_s and record.max_gap_s <= self.mtpot_s


@dataclass(frozen=True, slots=True)
class MeanAndPercentiles:
    """A distribution over requests, or over gaps between tokens; percentiles by nearest rank."""

    mean: Number = None
    p50: Number = None
    p99: Number = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one run.

    Rates are per second of the makespan, from the first arrival to the last token. Slowdown is the JCT of a request
    divided by its time alone on an idle service without a cached prefix or picture; below 1 if one was cached. Memory
    means are over the steps of all replicas; the peak is that of one replica. If outputs are returned whole, as in
    batch mode, there are no times between tokens, and TTFT alone decides whether a request is good.

    Attributes:
        num_failed: Requests that were refused or that fit into no replica.
        num_preempted: Requests whose KV was dropped or moved at least once.
        goodput_share: Share of all requests, including failed ones, that kept the SLA.
        total_tokens_per_s: Tokens of prompts and outputs, including padding.
        num_evictions: Number of times KV was dropped, to be computed again.
        num_swaps: Number of times KV was moved to the host.
        num_steps: Forward passes, of all replicas.
        prefix_hit_rate: Share of the prompt tokens found in the prefix cache.
        num_images_encoded: Pictures that the encoder computed; those found in its cache are not among them.
        mean_replicas: Replicas there or starting, as a mean over the time of the run.
    """

    num_requests: int
    num_failed: int
    num_preempted: int
    ttft_s: MeanAndPercentiles
    tpot_s: MeanAndPercentiles
    itl_s: MeanAndPercentiles
    mtpot_s: MeanAndPercentiles
    jct_s: MeanAndPercentiles
    slowdown: MeanAndPercentiles
    goodput_share: float
    goodput_requests_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_evictions: int
    evictions_per_100_requests: float
    num_swaps: int
    swaps_per_100_requests: float
    memory_mean_tokens: Number
    memory_mean_share: Number
    memory_peak_tokens: Number
    memory_peak_share: Number
    num_steps: int
    makespan_s: float
    prefix_hit_rate: float
    num_images_encoded: int = 0
    mean_replicas: float = 1.0

    def to_dict(self) -> dict[str, Number]:
        """Flat: a distribution as ``jct_s_mean``, ``jct_s_p50``, ``jct_s_p99``. The keys are a contract."""
        flat: dict[str, Number] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, MeanAndPercentiles):
                flat |= {f"{field.name}_{each.name}": getattr(value, each.name) for each in fields(MeanAndPercentiles)}
            else:
                flat[field.name] = value
        return flat


def summarize(
    recorder: Recorder,
    shape: ReplicaShape,
    latency: LatencyModel,
    sla: Sla,
    *,
    num_failed: int = 0,
    num_padding_tokens: int = 0,
    num_images_encoded: int = 0,
    mean_replicas: float = 1.0,
) -> Summary:
    """The numbers of a run that has ended; O(n log n) in its requests.

    Args:
        num_failed: Requests that did not run to their end.
        num_padding_tokens: Tokens computed only as padding.
        num_images_encoded, mean_replicas: As ``Summary`` has them.
    """
    done, usage = recorder.done, recorder.usage.values()
    num_good = sum(map(sla.meets, done))
    streamed = [record for record in done if record.num_tokens > 1] if recorder.gaps else []
    num_outputs = sum(record.num_tokens for record in done)
    num_prompts = sum(record.arrival.prompt_len for record in done)
    begin = min((record.arrival.arrived_at for record in done), default=0.0)
    makespan_s = max((record.finished_at for record in done), default=0.0) - begin
    num_steps = sum(each.num_steps for each in usage)
    mean_tokens = _ratio(sum(each.token_steps for each in usage), num_steps)
    peak_tokens = max((each.peak_tokens for each in usage), default=0)
    capacity = shape.num_blocks * shape.block_size
    num_evictions, num_swaps = sum(each.num_evictions for each in done), sum(each.num_swaps for each in done)
    return Summary(
        num_requests=len(done),
        num_failed=num_failed,
        num_preempted=sum(record.num_evictions + record.num_swaps > 0 for record in done),
        ttft_s=distribution([record.ttft_s for record in done]),
        tpot_s=distribution([record.tpot_s for record in streamed]),
        itl_s=_inter_token(recorder, streamed),
        mtpot_s=distribution([record.max_gap_s for record in streamed]),
        jct_s=distribution([record.jct_s for record in done]),
        slowdown=distribution(_slowdowns(done, shape, latency)),
        goodput_share=_ratio(num_good, len(done) + num_failed),
        goodput_requests_per_s=_ratio(num_good, makespan_s),
        requests_per_s=_ratio(len(done), makespan_s),
        output_tokens_per_s=_ratio(num_outputs, makespan_s),
        total_tokens_per_s=_ratio(num_prompts + num_outputs + num_padding_tokens, makespan_s),
        num_evictions=num_evictions,
        evictions_per_100_requests=_ratio(100 * num_evictions, len(done)),
        num_swaps=num_swaps,
        swaps_per_100_requests=_ratio(100 * num_swaps, len(done)),
        memory_mean_tokens=mean_tokens if peak_tokens else None,
        memory_mean_share=mean_tokens / capacity if peak_tokens else None,
        memory_peak_tokens=peak_tokens or None,
        memory_peak_share=peak_tokens / capacity if peak_tokens else None,
        num_steps=num_steps,
        makespan_s=makespan_s,
        prefix_hit_rate=_ratio(sum(record.cached_len for record in done), num_prompts),
        num_images_encoded=num_images_encoded,
        mean_replicas=mean_replicas,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def distribution(values: Sequence[float]) -> MeanAndPercentiles:
    """The distribution of values in any order; None without values."""
    if not values:
        return MeanAndPercentiles()
    ordered = np.sort(np.asarray(values))
    p50, p99 = np.percentile(ordered, (50, 99), method="inverted_cdf")
    return MeanAndPercentiles(float(ordered.mean()), float(p50), float(p99))


def _inter_token(recorder: Recorder, streamed: Sequence[Record]) -> MeanAndPercentiles:
    """The exact mean, and percentiles with 1 % accuracy from the histogram of gaps."""
    if not streamed:
        return MeanAndPercentiles()
    total_s = sum(record.last_token_at - record.first_token_at for record in streamed)
    num_gaps = sum(record.num_tokens - 1 for record in streamed)
    return MeanAndPercentiles(total_s / num_gaps, recorder.itl_s(0.5), recorder.itl_s(0.99))


def _slowdowns(done: Sequence[Record], shape: ReplicaShape, latency: LatencyModel) -> list[float]:
    """Ideal times by lengths: requests with equal lengths take equal times."""
    alone: dict[tuple[int, int], float] = {}
    found = []
    for record in done:
        lengths = record.arrival.prompt_len, record.num_tokens
        if lengths not in alone:
            alone[lengths] = alone_s(*lengths, shape.max_batch_tokens, latency)
        encoded_s = latency.image_cost.encode_s([image.tokens for image in record.arrival.images])
        found.append(record.jct_s / (encoded_s + alone[lengths]))
    return found


def alone_s(prompt_len: int, output_len: int, max_batch_tokens: int, latency: LatencyModel) -> float:
    """The time of a request on an idle replica: its prompt in chunks, the last of which gives the first token, and one
    step per further token."""
    whole, rest = divmod(prompt_len, max_batch_tokens)
    starts = range(0, whole * max_batch_tokens, max_batch_tokens)
    seconds = sum(latency.step_s(max_batch_tokens, 0, 0, attention_pairs(max_batch_tokens, at)) for at in starts)
    if rest == 1:
        seconds += latency.step_s(0, 1, prompt_len)  # A single token is computed like a decoding step.
    elif rest:
        seconds += latency.step_s(rest, 0, 0, attention_pairs(rest, prompt_len - rest))
    return seconds + latency.decode_run_s(1, prompt_len + 1, output_len - 1)


_LATENCIES = {
    "TTFT s": "ttft_s",
    "TPOT s": "tpot_s",
    "ITL s": "itl_s",
    "MTPOT s": "mtpot_s",
    "JCT s": "jct_s",
    "slowdown": "slowdown",
}
_COUNTS = {
    "requests": "num_requests",
    "failed": "num_failed",
    "preempted": "num_preempted",
    "good, share": "goodput_share",
    "good, requests/s": "goodput_requests_per_s",
    "requests/s": "requests_per_s",
    "output tokens/s": "output_tokens_per_s",
    "all tokens/s": "total_tokens_per_s",
    "evictions": "num_evictions",
    "evictions per 100 requests": "evictions_per_100_requests",
    "swaps": "num_swaps",
    "swaps per 100 requests": "swaps_per_100_requests",
    "KV memory, mean share": "memory_mean_share",
    "KV memory, peak share": "memory_peak_share",
    "prefix hit rate": "prefix_hit_rate",
    "pictures encoded": "num_images_encoded",
    "replicas, mean": "mean_replicas",
    "steps": "num_steps",
    "makespan s": "makespan_s",
}


def tables(summary: Summary) -> list[Table]:
    """Tables: first the latencies, then the other numbers."""
    from rich.table import Table

    latencies = Table("latency", *(field.name for field in fields(MeanAndPercentiles)))
    for heading, name in _LATENCIES.items():
        value = getattr(summary, name)
        latencies.add_row(heading, *(show(getattr(value, field.name)) for field in fields(MeanAndPercentiles)))
    counts = Table("run", "")
    for heading, name in _COUNTS.items():
        counts.add_row(heading, show(getattr(summary, name)))
    for column in (*latencies.columns[1:], counts.columns[1]):
        column.justify = "right"
    return [latencies, counts]


def show(value: Number) -> str:
    """Three significant digits, and all digits before the point; a dash for None."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"
