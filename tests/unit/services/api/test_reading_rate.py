"""What a request says of its reader: nothing, the server's usual rate, or a rate of its own."""

from __future__ import annotations

import pytest

from farsight.core.request import SamplingParams
from farsight.services.api.dialects.running import _reading_rate
from farsight.services.api.errors import ApiError
from farsight.services.api.generation import Generation
from farsight.services.api.requests import unnamed_request
from farsight.tokenization.tool_formats.parts import OutputForm


def generation(*, stream: bool, form: OutputForm | None = None) -> Generation:
    return Generation((unnamed_request((1,), SamplingParams(4)),), (None,), "m", True, stream=stream, form=form)


def test_a_stream_is_read_at_the_usual_rate_or_at_that_of_its_header() -> None:
    assert _reading_rate(generation(stream=False), "5") is None, "who waits for the end reads nothing before it"
    assert _reading_rate(generation(stream=True), None) == 0.0
    assert _reading_rate(generation(stream=True), "7.5") == 7.5
    assert _reading_rate(generation(stream=True, form=OutputForm("json", ("f",), forced=True)), None) is None
    named = generation(stream=True).named(b"", str, 7.5)
    assert [each.reading_rate for each in named.requests] == [7.5]


@pytest.mark.parametrize("header", ["fast", "0", "-3", "nan", "inf"])
def test_a_rate_that_is_none_is_refused(header: str) -> None:
    with pytest.raises(ApiError, match=r"x-farsight-reading-rate.*tokens a second above 0"):
        _reading_rate(generation(stream=True), header)
