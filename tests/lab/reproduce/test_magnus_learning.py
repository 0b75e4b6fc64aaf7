"""Table I and the estimator that learns, on texts made here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lab.reproduce.magnus_learning import estimator_learning, table_1
from lab.reproduce.magnus_systems import CORRELATION, load_pool


@pytest.fixture
def _texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"app": app, "task": app, "instruction": "do", "user_input": "a " * (3 + n % 40), "output": "b " * (5 + n % 40)}
        for app in CORRELATION
        for n in range(60)
    ]
    path = tmp_path / "apps_text.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    monkeypatch.setenv("FARSIGHT_DATA", str(tmp_path))
    load_pool.cache_clear()


@pytest.mark.usefixtures("_texts")
def test_the_correlation_is_that_of_the_texts() -> None:
    rows = {row.setting: row for row in table_1()}
    assert {row.check.basis for name, row in rows.items() if name != "all"} == {"printed"}
    assert rows["MT"].ours == pytest.approx(1.0, abs=0.01), "outputs are as long as inputs here"
    assert rows["all"].ours == len(CORRELATION) and rows["all"].verdict == "ok"


@pytest.mark.usefixtures("_texts")
def test_the_estimator_is_scored_before_it_learns() -> None:
    *points, ratio = estimator_learning(num_requests=2400, rate=30.0)
    assert points and all(row.ours > 0 for row in points)
    assert ratio.check.basis == "order" and ratio.ours > 0
    load_pool.cache_clear()


def test_without_the_texts_it_says_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSIGHT_DATA", str(tmp_path))
    load_pool.cache_clear()
    for (row,) in (table_1(), estimator_learning()):
        assert row.verdict == "exempt" and row.remark
