"""By what a latency in a histogram is found again."""

from __future__ import annotations

import pytest

from core.request import Origin, Request, SamplingParams
from services.ingress.streams import StreamTrace

ANSWER = "cmpl-1f"


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, {}),
        (Origin(ANSWER), {"response_id": ANSWER}),
        (
            Origin(ANSWER, traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"),
            {"response_id": ANSWER, "trace_id": "ab" * 16},
        ),
    ],
)
def test_the_answer_and_its_trace_are_named(origin: Origin | None, expected: dict[str, str]) -> None:
    request = Request("r", 0, "", (5,), SamplingParams(1), origin=origin)
    assert StreamTrace(request, 0.0).exemplar == expected
