"""Requests, and the small parts of the core: costs, what is degraded, when to learn, sizes."""

from __future__ import annotations

import dataclasses
import math

import pytest

from farsight.core.config.engine import parse_memory
from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.core.learning import ErrorRule, Schedule
from farsight.core.messages.status import FORECASTS_SHED, LOG_WRITE, MAX_REASON, Degraded
from farsight.core.request import Request, SamplingParams, SequenceStatus


def test_statuses_are_ordered_and_everything_from_stopped_on_is_an_end() -> None:
    ends = {status.name: status.finish_reason for status in SequenceStatus if status >= SequenceStatus.FINISHED_STOPPED}
    assert ends == {
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_FAILED": "error",
    }
    assert all(status.finish_reason is None for status in SequenceStatus if status < SequenceStatus.FINISHED_STOPPED)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": ((-1, 0.0),)}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"benchmark_len": 0}, "benchmark_len"),
    ],
)
def test_sampling_parameters_out_of_range_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**{"max_new_tokens": 5, **options})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_request_needs_a_prompt_and_knows_its_bound() -> None:
    assert Request("a", 0, "i", (1, 2, 3), SamplingParams(4)).max_total_len == 7
    with pytest.raises(InvalidValueError, match="prompt"):
        Request("a", 0, "i", (), SamplingParams(4))
    resumed = Request("a", 1, "i", (1, 2, 3), SamplingParams(4), (7, 8))
    assert (resumed.prompt_len, resumed.known_len, resumed.max_total_len) == (3, 5, 7)
    for num_output in (4, 5):
        with pytest.raises(InvalidValueError, match="max_tokens = 4") as caught:
            Request("a", 1, "i", (1,), SamplingParams(4), (9,) * num_output)
        assert (caught.value.field, caught.value.value) == ("output_ids", num_output)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"min_p": 0.5, "top_k": 3, "benchmark_len": 9, "stop": ("x",)}, True),
        ({"temperature": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"logit_bias": ((3, 1.0),)}, False),
        ({"min_tokens": 1}, False),
        ({"logprobs": 0}, False),
    ],
)
def test_plain_is_what_argmax_alone_answers(options: dict[str, object], plain: bool) -> None:
    assert SamplingParams(**{"max_new_tokens": 5, **options}).plain is plain  # type: ignore[arg-type]


def test_two_models_are_alike_if_they_price_every_kind_of_step_alike() -> None:
    cost = StepCost(0.01, 1e-4, 1e-3, 1e-6, 1e-9)
    assert cost.is_like(cost, 0.0)
    for field in ("base_s", "prefill_token_s", "decode_seq_s", "context_token_s", "prefill_pair_s"):
        dearer = dataclasses.replace(cost, **{field: 1000 * getattr(cost, field)})
        assert not dearer.is_like(cost, 0.05) and not cost.is_like(dearer, 0.05)
    assert dataclasses.replace(cost, base_s=0.0101).is_like(cost, 0.05)


def test_what_lasts_is_said_until_it_is_over() -> None:
    degraded = Degraded()
    assert degraded.reason(0.0) == ""
    degraded.clear(LOG_WRITE)
    assert not list(degraded.causes(0.0))
    degraded.note(LOG_WRITE, "the disk is full")
    degraded.note(LOG_WRITE, "the disk is away")
    assert degraded.reason(1e9) == "the disk is away"
    degraded.clear(LOG_WRITE)
    assert degraded.reason(0.0) == ""
    assert list(degraded.causes(0.0)) == [(LOG_WRITE, False)]


def test_single_events_are_said_for_a_while_beside_others() -> None:
    degraded = Degraded()
    degraded.note(FORECASTS_SHED, "shed", 5.0, 10.0)
    degraded.note(LOG_WRITE, "x" * 10_000)
    assert degraded.reason(14.9) == "shed; " + "x" * MAX_REASON
    degraded.note(FORECASTS_SHED, "shed again", 14.9, 10.0)
    assert degraded.reason(24.8).startswith("shed again; ")
    assert dict(degraded.causes(24.9)) == {FORECASTS_SHED: False, LOG_WRITE: True}


def test_an_error_must_exceed_both_limits() -> None:
    rule = ErrorRule(min_error=10, min_share=0.1)
    assert rule.is_wrong(predicted=100, actual=112)
    assert rule.is_wrong(predicted=112, actual=100)
    assert not rule.is_wrong(predicted=50, actual=60), "10 does not exceed 10"
    assert not rule.is_wrong(predicted=180, actual=200), "20 does not exceed a tenth of 200"
    assert rule.is_wrong(predicted=179, actual=200)


@pytest.mark.parametrize("field", ["min_error", "min_share"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_limits_that_mean_nothing_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=field):
        ErrorRule(**{"min_error": 1.0, "min_share": 0.1, field: value})


def test_a_period_begins_with_the_first_question_and_again_whenever_one_is_over() -> None:
    schedule = Schedule(120)
    claimed = [now for now in (1000, 1119, 1120, 1121, 1239, 1250, 1369, 1370, 2000, 2000) if schedule.claim(now)]
    assert claimed == [1120, 1250, 1370, 2000]
    for period_s in (0, -1, math.nan, math.inf):
        with pytest.raises(InvalidValueError, match="period_s"):
            Schedule(period_s)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1024", 1024), ("512MiB", 2**29), ("2 GiB", 2**31), ("1.5GB", 1_500_000_000), ("0.5kib", 512), ("7B", 7)],
)
def test_parse_memory(text: str, expected: int) -> None:
    assert parse_memory(text) == expected
    for wrong in ("", "GiB", "-1GiB", "0", "0.0GB", "1.5.2GB", "1e9", "1GiBB", "nan"):
        with pytest.raises(InvalidValueError, match="memory"):
            parse_memory(wrong)
