"""Statistics of runs. Latencies are in milliseconds; failed answers count only as errors."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from farsight.services.bench.answers import Answer, Sla, meets
from farsight.services.bench.load import RunResult

Metrics = dict[str, float]
"""Numbers of one run by name; a number that the run does not have is absent."""

LATENCIES = ("ttft_ms", "tpot_ms", "mtpot_ms", "jct_ms")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def weighted_percentile(values: Sequence[tuple[float, float]], share: float) -> float:
    """The same for pairs of value and weight; weights are above 0."""
    ordered = sorted(values)
    reached = list(itertools.accumulate(weight for _, weight in ordered))
    # The factor allows for rounding in the sums of weights.
    place = bisect.bisect_left(reached, share * reached[-1] * (1 - 1e-12))
    return ordered[place][0]


def distribution(name: str, values: Sequence[float]) -> Metrics:
    """Mean, p50 and p99 under ``name_mean`` and so on; nothing if there are no values."""
    if not values:
        return {}
    points = {"mean": statistics.fmean(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
    return {f"{name}_{point}": value for point, value in points.items()}


def latencies(answers: Iterable[Answer]) -> dict[str, list[float]]:
    """The values of ``LATENCIES`` of the complete answers."""
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for answer in answers:
        if answer.failure is None:
            seconds = (answer.ttft_s, answer.tpot_s, answer.mtpot_s, answer.jct_s)
            for name, value in zip(LATENCIES, seconds, strict=True):
                if value is not None:
                    found[name].append(1000 * value)
    return found


def run_metrics(run: RunResult, sla: Sla | None = None) -> Metrics:
    """All numbers of a run; ``answers`` defines them."""
    good = [answer for answer in run.answers if answer.failure is None]
    num_tokens = sum(answer.num_tokens for answer in good)
    num_chunks = sum(len(answer.chunks_at) for answer in good)
    metrics: Metrics = {
        "requests": len(run.answers),
        "errors": len(run.answers) - len(good),
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "cached_prompt_tokens": sum(answer.cached_tokens for answer in good),
        "output_tokens": num_tokens,
        "chunks": num_chunks,
        "answers_ended": sum(answer.finish_reason not in (None, "length") for answer in good),
        "answers_cut": sum(answer.finish_reason == "length" for answer in good),
        "wall_s": run.wall_s,
        "requests_per_s": len(good) / run.wall_s,
        "output_tokens_per_s": num_tokens / run.wall_s,
    }
    if num_chunks:
        metrics["tokens_per_chunk"] = num_tokens / num_chunks
    for name, values in latencies(good).items():
        metrics |= distribution(name, values)
    metrics |= _itl(good) | _by_kind(good) | _cpu(run, num_tokens)
    metrics |= distribution("late_ms", [1000 * answer.late_s for answer in run.answers if answer.late_s is not None])
    if sla is not None:
        num_met = sum(meets(answer, sla) for answer in run.answers)
        metrics["goodput_requests_per_s"] = num_met / run.wall_s
        metrics["sla_percent"] = 100 * num_met / len(run.answers)
    return metrics


def _itl(good: Sequence[Answer]) -> Metrics:
    """Weighted by tokens; a gap of an answer stands for ``tokens_per_gap`` of them."""
    values = [
        (1000 * gap / answer.tokens_per_gap, answer.tokens_per_gap)
        for answer in good
        if answer.tokens_per_gap > 0
        for gap in answer.gaps_s
    ]
    if not values:
        return {}
    mean = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
    p50, p99 = weighted_percentile(values, 0.5), weighted_percentile(values, 0.99)
    return {"itl_ms_mean": mean, "itl_ms_p50": p50, "itl_ms_p99": p99}


def _by_kind(good: Sequence[Answer]) -> Metrics:
    """TTFT and JCT by kind of request, if there are several."""
    kinds = sorted({answer.kind for answer in good})
    metrics: Metrics = {}
    for kind in kinds if len(kinds) > 1 else ():
        of_kind = latencies(answer for answer in good if answer.kind == kind)
        for name in ("ttft_ms", "jct_ms"):
            metrics |= distribution(f"{kind or 'other'}_{name}", of_kind[name])
    return metrics


def _cpu(run: RunResult, num_tokens: int) -> Metrics:
    usage = run.usage
    metrics: Metrics = {"client_cpu_s": usage.client_s}
    if usage.server_s is not None:
        metrics["server_cpu_s"] = usage.server_s
        if usage.server_s > 0:
            metrics["output_tokens_per_server_cpu_s"] = num_tokens / usage.server_s
    if usage.others_s is not None:
        metrics["other_cores"] = usage.others_s / run.wall_s
    return metrics


def counted_by(answers: Iterable[Answer]) -> dict[str, int]:
    """The number of answers by source of their token count."""
    return dict(Counter(str(answer.counted_by) for answer in answers if answer.failure is None))


def error_kinds(answers: Iterable[Answer]) -> dict[str, int]:
    """The number of failed answers by kind, the most frequent first."""
    return dict(Counter(answer.failure.kind for answer in answers if answer.failure is not None).most_common())


def error_examples(answers: Iterable[Answer]) -> dict[str, str]:
    """One detail for each kind of error."""
    return {answer.failure.kind: answer.failure.detail for answer in answers if answer.failure is not None}


def summarize(runs: Sequence[Metrics]) -> dict[str, Metrics]:
    """The min, median and max of each number over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: spread([run[name] for run in runs if name in run]) for name in names}


def spread(values: Sequence[float]) -> Metrics:
    """The min, median and max of at least one value."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ratios(runs: Sequence[Metrics], base_runs: Sequence[Metrics]) -> dict[str, Metrics]:
    """The spread of run / base run of each number, round by round, without rounds that lack it or whose base is 0."""
    found: dict[str, list[float]] = {}
    for run, base in zip(runs, base_runs, strict=True):
        for name in run.keys() & base.keys():
            if base[name]:
                found.setdefault(name, []).append(run[name] / base[name])
    return {name: spread(values) for name, values in sorted(found.items())}


def token_rate(runs: Sequence[RunResult], num_bins: int) -> tuple[list[float], list[float]]:
    """Output tokens per second over time: bin centres in seconds from the start, and the mean rate of the runs.

    The tokens of an answer are divided evenly among its chunks.
    """
    span_s = max(run.wall_s for run in runs)
    width_s = span_s / num_bins
    rates = [0.0] * num_bins
    for run in runs:
        for answer in run.answers:
            if answer.failure is None:
                share = answer.num_tokens / len(answer.chunks_at) / width_s / len(runs)
                for at in answer.chunks_at:
                    rates[min(num_bins - 1, int((at - run.began_at) / width_s))] += share
    return [(i + 0.5) * width_s for i in range(num_bins)], rates


def per_request(run: RunResult) -> list[Mapping[str, float | str | None]]:
    """A record of each request, in the order of the workload; seconds from the beginning of the run."""
    return [_record(answer, run.began_at) for answer in sorted(run.answers, key=lambda answer: answer.id)]


def _record(answer: Answer, began_at: float) -> Mapping[str, float | str | None]:
    has_chunks = bool(answer.chunks_at)
    return {
        "id": answer.id,
        "kind": answer.kind,
        "sent_s": round(answer.sent_at - began_at, 6),
        "ttft_s": round(answer.ttft_s, 6) if has_chunks else None,
        "mtpot_s": round(answer.mtpot_s, 6) if answer.mtpot_s is not None else None,
        "jct_s": round(answer.jct_s, 6),
        "tokens": answer.num_tokens,
        "chunks": len(answer.chunks_at),
        "finish_reason": answer.finish_reason,
        "error": answer.failure.kind if answer.failure else None,
    }
