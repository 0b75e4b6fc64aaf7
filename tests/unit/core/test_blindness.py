"""What decides must not know what only the future tells."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_nobody_who_schedules_or_predicts_mentions_the_true_length() -> None:
    readers = [
        path.relative_to(ROOT).as_posix()
        for room in ("policies", "predictor", "estimator", "kvcache", "actors")
        for path in (ROOT / room).rglob("*.py")
        if "benchmark_len" in path.read_text("utf-8")
    ]
    assert readers == []
