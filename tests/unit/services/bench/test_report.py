"""Tables and the facts beside the numbers."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from services.bench.report import case_table, cell, provenance


def spread(low: float, median: float, high: float) -> dict[str, float]:
    return {"min": low, "median": median, "max": high}


def target(label: str, rate: float) -> dict[str, Any]:
    return {"label": label, "summary": {"output_tokens_per_s": spread(rate, rate, 2 * rate), "errors": spread(0, 0, 0)}}


def test_a_table_of_two_servers() -> None:
    ratio = {"label": "b", "base": "a", "ratios": {"output_tokens_per_s": spread(1.5, 2.0, 2.5)}}
    table = case_table({"name": "hol", "targets": [target("a", 100.0), target("b", 0.0123)], "ratios": [ratio]})
    lines = [[word.strip() for word in line.split("|")[1:-1]] for line in table.splitlines()]
    assert lines[0] == ["hol", "a", "b", "b / a"]
    assert lines[2] == ["output tok/s", "100 (100 to 200)", "0.0123 (0.0123 to 0.0246)", "2 (1.50 to 2.50)"]
    assert lines[3] == ["errors", "0", "0", "-"]
    assert len(lines) == 4


def test_kinds_of_requests_have_rows() -> None:
    summary = {"short_jct_ms_p50": spread(5, 5, 5), "long_jct_ms_p50": spread(9, 9, 9)}
    table = case_table({"name": "hol", "targets": [{"label": "a", "summary": summary}], "ratios": []})
    assert "JCT ms p50, short" in table and "JCT ms p50, long" in table


def test_several_numbers_in_a_cell() -> None:
    assert cell({"x": spread(1, 1234.5, 2000)}, ["x", "y"]) == "1234 / -"


def test_the_key_is_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["farsight", "bench", "--api-key", "s3cret", "--api-key=s3cret", "--rate", "3"])
    assert "s3cret" not in str(provenance(["farsight"]))
    assert provenance(["farsight"])["command"] == "farsight bench --api-key ... --api-key=... --rate 3"
