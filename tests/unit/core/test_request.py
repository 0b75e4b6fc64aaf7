"""Requests, their limits and how they end."""

from __future__ import annotations

import pytest

from core.errors import InvalidValueError
from core.request import Request, SamplingParams, SequenceStatus


def test_statuses_are_ordered_and_everything_from_stopped_on_is_an_end() -> None:
    ends = {status.name: status.finish_reason for status in SequenceStatus if status.is_finished}
    assert ends == {
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_FAILED": "error",
    }
    assert all(status.finish_reason is None for status in SequenceStatus if not status.is_finished)


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


def test_a_resumed_request_knows_its_output_and_has_the_same_bound() -> None:
    resumed = Request("a", 1, "i", (1, 2, 3), SamplingParams(4), (7, 8))
    assert (resumed.prompt_len, resumed.known_len, resumed.max_total_len) == (3, 5, 7)


@pytest.mark.parametrize("num_output", [4, 5])
def test_a_resumed_request_must_have_something_left_to_say(num_output: int) -> None:
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
