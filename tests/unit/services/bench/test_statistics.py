"""Numbers of runs."""

from __future__ import annotations

import pytest

from core.errors import InvalidValueError
from services.bench.answers import Answer, CountedBy, Failure
from services.bench.load import CpuUsage, RunResult
from services.bench.sla import meets, parse_sla
from services.bench.statistics import (
    counted_by,
    distribution,
    error_kinds,
    per_request,
    percentile,
    ratios,
    run_metrics,
    summarize,
    token_rate,
    weighted_percentile,
)


def answer(chunks_at: list[float], num_tokens: int, kind: str = "", failure: Failure | None = None) -> Answer:
    ended_at = chunks_at[-1] if chunks_at else 0.0
    return Answer(
        0, kind, 0.0, ended_at=ended_at, chunks_at=chunks_at, num_tokens=num_tokens,
        counted_by=CountedBy.USAGE, failure=failure,
    )  # fmt: skip


def result(*answers: Answer, usage: CpuUsage | None = None) -> RunResult:
    return RunResult(answers, 0.0, 2.0, usage or CpuUsage(0.1))


def test_percentile_is_the_nearest_rank() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0.25, 0.5, 0.51, 0.99)] == [1.0, 2.0, 3.0, 4.0]
    assert distribution("x", []) == {}


def test_weighted_percentile_counts_weights() -> None:
    assert weighted_percentile([(1.0, 9.0), (5.0, 1.0)], 0.5) == 1.0
    assert weighted_percentile([(1.0, 9.0), (5.0, 1.0)], 0.9) == 1.0
    assert weighted_percentile([(1.0, 9.0), (5.0, 1.0)], 0.95) == 5.0
    assert weighted_percentile([(value / 10, 0.1) for value in range(10)], 1.0) == 0.9


def test_metrics_of_a_run() -> None:
    run = result(
        answer([0.5, 1.0], 11),  # ten tokens in the one gap
        answer([0.1, 0.2, 0.4], 3),
        answer([], 0, failure=Failure("timeout", "t")),
        usage=CpuUsage(0.1, 0.5, 0.4),
    )
    metrics = run_metrics(run)
    assert (metrics["requests"], metrics["errors"], metrics["output_tokens"]) == (3, 1, 14)
    assert metrics["requests_per_s"] == 1.0
    assert metrics["output_tokens_per_s"] == 7.0
    assert metrics["tokens_per_chunk"] == pytest.approx(14 / 5)
    assert metrics["ttft_ms_mean"] == pytest.approx(300)
    assert metrics["tpot_ms_p99"] == pytest.approx(150)
    assert metrics["mtpot_ms_p50"] == pytest.approx(200)
    assert metrics["jct_ms_p99"] == pytest.approx(1000)
    assert metrics["itl_ms_mean"] == pytest.approx(800 / 12)
    assert metrics["itl_ms_p50"] == pytest.approx(50)
    assert metrics["itl_ms_p99"] == pytest.approx(200)
    assert metrics["output_tokens_per_server_cpu_s"] == 28
    assert metrics["other_cores"] == pytest.approx(0.2)


def test_a_run_in_which_all_failed_has_no_latencies() -> None:
    metrics = run_metrics(result(answer([], 0, failure=Failure("timeout", "t"))), {"ttft": 1.0})
    assert metrics["errors"] == 1 and metrics["goodput_requests_per_s"] == 0
    assert not any("ttft" in name for name in metrics)


def test_kinds_have_their_own_latencies() -> None:
    metrics = run_metrics(result(answer([1.0], 1, "short"), answer([3.0], 1, "long")))
    assert (metrics["short_jct_ms_p50"], metrics["long_jct_ms_p50"]) == (1000, 3000)
    assert "short_jct_ms_p50" not in run_metrics(result(answer([1.0], 1, "short")))


def test_goodput() -> None:
    sla = parse_sla("ttft=600, mtpot=0.15s")
    assert sla == {"ttft": 600.0, "mtpot": 150.0}
    good, slow, choppy = answer([0.5, 0.6], 2), answer([0.7], 1), answer([0.1, 0.3], 2)
    failed = answer([0.1], 1, failure=Failure("stream cut", ""))
    assert [meets(each, sla) for each in (good, slow, choppy, failed)] == [True, False, False, False]
    metrics = run_metrics(result(good, slow, choppy, failed), sla)
    assert (metrics["goodput_requests_per_s"], metrics["sla_percent"]) == (0.5, 25)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=-1", "ttft=nan", "e2e=5", "ttft=1,ttft=2", "ttft=5min"])
def test_a_wrong_sla_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match="--sla"):
        parse_sla(text)


def test_errors_are_counted_by_kind() -> None:
    answers = [answer([], 0, failure=Failure(kind, "")) for kind in ("timeout", "HTTP 503", "timeout")]
    assert error_kinds(answers) == {"timeout": 2, "HTTP 503": 1}
    assert counted_by([*answers, answer([0.1], 1)]) == {"usage": 1}


def test_summaries_and_ratios() -> None:
    runs, base = [{"a": 2.0}, {"a": 6.0, "b": 1.0}], [{"a": 1.0}, {"a": 2.0, "b": 0.0}]
    assert summarize(runs)["a"] == {"min": 2.0, "median": 4.0, "max": 6.0}
    assert ratios(runs, base) == {"a": {"min": 2.0, "median": 2.5, "max": 3.0}}


def test_token_rate_adds_up_to_the_tokens() -> None:
    times, rates = token_rate([result(answer([0.5, 2.0], 10), answer([1.9], 1))], num_bins=4)
    assert times == [0.25, 0.75, 1.25, 1.75]
    assert rates == [0.0, 10.0, 0.0, 12.0]


def test_a_record_of_a_request_that_failed() -> None:
    (record,) = per_request(result(answer([], 0, failure=Failure("timeout", "t"))))
    assert (record["error"], record["ttft_s"], record["tokens"]) == ("timeout", None, 0)
