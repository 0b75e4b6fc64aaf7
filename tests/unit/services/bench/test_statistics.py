"""How streams are read, numbers of runs, their tables, and the facts beside them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from farsight.core.errors import InvalidValueError
from farsight.services.bench.answers import Answer, CountedBy, Failure, StreamReader, meets, parse_sla
from farsight.services.bench.load import CpuUsage, RunResult
from farsight.services.bench.report import case_table, cell, provenance
from farsight.services.bench.statistics import (
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


TIMED_OUT = answer([], 0, failure=Failure("timeout", "t"))


def result(*answers: Answer, usage: CpuUsage | None = None) -> RunResult:
    return RunResult(answers, 0.0, 2.0, usage or CpuUsage(0.1))


def test_percentile_is_the_nearest_rank() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0.25, 0.5, 0.51, 0.99)] == [1.0, 2.0, 3.0, 4.0]
    assert distribution("x", []) == {}


@pytest.mark.parametrize(("share", "value"), [(0.5, 1.0), (0.9, 1.0), (0.95, 5.0)])
def test_weighted_percentile_counts_weights(share: float, value: float) -> None:
    assert weighted_percentile([(1.0, 9.0), (5.0, 1.0)], share) == value
    assert weighted_percentile([(number / 10, 0.1) for number in range(10)], 1.0) == 0.9


def test_metrics_of_a_run() -> None:
    run = result(
        answer([0.5, 1.0], 11),  # ten tokens in the one gap
        answer([0.1, 0.2, 0.4], 3),
        TIMED_OUT,
        usage=CpuUsage(0.1, 0.5, 0.4),
    )
    expected = {
        "requests": 3.0,
        "errors": 1.0,
        "output_tokens": 14.0,
        "requests_per_s": 1.0,
        "output_tokens_per_s": 7.0,
    }
    expected |= {"tokens_per_chunk": 14 / 5, "output_tokens_per_server_cpu_s": 28, "other_cores": 0.2}
    expected |= {"ttft_ms_mean": 300, "tpot_ms_p99": 150, "mtpot_ms_p50": 200, "jct_ms_p99": 1000}
    expected |= {"itl_ms_mean": 800 / 12, "itl_ms_p50": 50, "itl_ms_p99": 200}
    run.answers[0].finish_reason, run.answers[1].finish_reason = "stop", "length"
    expected |= {"answers_ended": 1, "answers_cut": 1}
    metrics = run_metrics(run)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_a_run_in_which_all_failed_has_no_latencies() -> None:
    metrics = run_metrics(result(TIMED_OUT), {"ttft": 1.0})
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
    (record,) = per_request(result(TIMED_OUT))
    assert (record["error"], record["ttft_s"], record["tokens"]) == ("timeout", None, 0)


def spread_of(low: float, median: float, high: float) -> dict[str, float]:
    return {"min": low, "median": median, "max": high}


def target(label: str, rate: float) -> dict[str, Any]:
    return {
        "label": label,
        "summary": {"output_tokens_per_s": spread_of(rate, rate, 2 * rate), "errors": spread_of(0, 0, 0)},
    }


def test_a_table_of_two_servers() -> None:
    ratio = {"label": "b", "base": "a", "ratios": {"output_tokens_per_s": spread_of(1.5, 2.0, 2.5)}}
    table = case_table({"name": "hol", "targets": [target("a", 100.0), target("b", 0.0123)], "ratios": [ratio]})
    lines = [[word.strip() for word in line.split("|")[1:-1]] for line in table.splitlines()]
    assert lines[0] == ["hol", "a", "b", "b / a"]
    assert lines[2] == ["output tok/s", "100 (100 to 200)", "0.0123 (0.0123 to 0.0246)", "2 (1.50 to 2.50)"]
    assert lines[3] == ["errors", "0", "0", "-"]
    assert len(lines) == 4


def test_kinds_of_requests_have_rows() -> None:
    summary = {"short_jct_ms_p50": spread_of(5, 5, 5), "long_jct_ms_p50": spread_of(9, 9, 9)}
    table = case_table({"name": "hol", "targets": [{"label": "a", "summary": summary}], "ratios": []})
    assert "JCT ms p50, short" in table and "JCT ms p50, long" in table


def test_several_numbers_in_a_cell() -> None:
    assert cell({"x": spread_of(1, 1234.5, 2000)}, ["x", "y"]) == "1234 / -"


def test_the_key_is_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["farsight", "bench", "--api-key", "s3cret", "--api-key=s3cret", "--rate", "3"])
    assert "s3cret" not in str(provenance(["farsight"]))
    assert provenance(["farsight"])["command"] == "farsight bench --api-key ... --api-key=... --rate 3"


CHUNK = b'data: {"id":"x","choices":[{"index":0,"text":"a \\"usage\\": {","finish_reason":null}]}\n\n'
SPACED = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}], "usage": null}\r\n\r\n'
LAST = b'data: {"choices":[{"index":0,"text":"b","finish_reason":"length"}]}\n\n'
LAST_EMPTY = b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
DELTA = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'


def read(*pieces: bytes) -> Answer:
    """Piece ``i`` arrives at second ``i``; seven tokens were asked for."""
    answer = Answer(0, "", sent_at=-1.0)
    reader = StreamReader(answer)
    for now, piece in enumerate(pieces):
        reader.feed(piece, float(now))
    reader.finish(7)
    return answer


def test_times_and_usage() -> None:
    answer = read(CHUNK, SPACED, LAST, USAGE, DONE)
    assert answer.failure is None
    assert answer.chunks_at == [0.0, 1.0, 2.0]
    assert (answer.num_tokens, answer.prompt_tokens, answer.counted_by) == (7, 4, CountedBy.USAGE)
    assert answer.ttft_s == 1.0
    assert answer.tpot_s == pytest.approx(2 / 6)
    assert answer.tokens_per_gap == 3.0
    assert answer.mtpot_s == 1.0


WHOLE = CHUNK + SPACED + LAST + USAGE + DONE
USAGE_3, USAGE_1, USAGE_0 = (USAGE.replace(b":7", number) for number in (b":3", b":1", b":0"))
ROLE_ALONE = ROLE.replace(b'""', b"null")
LAST_WITH_USAGE = LAST.replace(b"}]}", b'}],"usage":{"completion_tokens":2}}')
DELTA_WITH_ROLE = DELTA.replace(b'"content"', b'"role":"assistant","content"')
NO_TEXT = DELTA.replace(b'"a"', b'""')


@pytest.mark.parametrize(
    ("pieces", "num_tokens", "counted_by", "num_chunks"),
    [
        pytest.param([WHOLE[i : i + 5] for i in range(0, len(WHOLE), 5)], 7, CountedBy.USAGE, 3, id="cut anywhere"),
        pytest.param([CHUNK, LAST, DONE], 7, CountedBy.LENGTH, 2, id="no usage: an end by length tells the tokens"),
        pytest.param([CHUNK, LAST], 7, CountedBy.LENGTH, 2, id="an end without DONE"),
        pytest.param([CHUNK, CHUNK, LAST_EMPTY, DONE], 2, CountedBy.CHUNKS, 2, id="neither: chunks, but no empty last"),
        pytest.param([CHUNK, CHUNK, LAST_EMPTY, USAGE_3, DONE], 3, CountedBy.USAGE, 3, id="it may carry the third"),
        pytest.param([*[CHUNK] * 3, LAST_EMPTY, USAGE_3, DONE], 3, CountedBy.USAGE, 3, id="there are three already"),
        pytest.param([LAST_EMPTY, USAGE_1, DONE], 1, CountedBy.USAGE, 1, id="it may carry the only one"),
        pytest.param([ROLE, LAST_EMPTY, USAGE_0, DONE], 0, CountedBy.USAGE, 1, id="an answer of nothing"),
        pytest.param([CHUNK, LAST_WITH_USAGE, DONE], 2, CountedBy.USAGE, 2, id="usage with the last choice"),
        pytest.param([ROLE, DELTA, DELTA, DONE], 2, CountedBy.CHUNKS, 2, id="the role of a chat is no token"),
        pytest.param([ROLE_ALONE, DELTA, DONE], 1, CountedBy.CHUNKS, 1, id="nor as llama-server sends it"),
        pytest.param([DELTA_WITH_ROLE] * 2 + [DONE], 2, CountedBy.CHUNKS, 2, id="a role with every token, as Ollama's"),
        pytest.param([CHUNK, NO_TEXT, DONE], 2, CountedBy.CHUNKS, 2, id="an empty text may be a token"),
        pytest.param([CHUNK, DONE.strip()], 1, CountedBy.CHUNKS, 1, id="a last line without its end"),
    ],
)
def test_tokens_are_counted_by_the_best_that_a_stream_tells(
    pieces: list[bytes], num_tokens: int, counted_by: CountedBy, num_chunks: int
) -> None:
    answer = read(*pieces)
    assert answer.failure is None
    assert (answer.num_tokens, answer.counted_by, len(answer.chunks_at)) == (num_tokens, counted_by, num_chunks)


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([CHUNK], "stream cut"),
        ([], "stream cut"),
        ([DONE], "no token"),
        ([CHUNK, b'data: {"error":{"message":"full"}}\n\n'], "error in the stream"),
        ([CHUNK, b'data: {"error":{"message":"full"}}\n\n', DONE], "error in the stream"),
    ],
)
def test_answers_that_are_not_whole(pieces: list[bytes], kind: str) -> None:
    failure = read(*pieces).failure
    assert failure is not None and failure.kind == kind


@pytest.mark.parametrize("event", [b'data: {"choices":[{"finish_reason":"length"\n', b'data: ["choices"]\n'])
def test_an_event_that_is_not_json_is_refused(event: bytes) -> None:
    with pytest.raises(ValueError):
        read(event)
