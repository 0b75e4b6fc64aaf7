"""Parts of a measurement of promises, kept in a file."""

from __future__ import annotations

from pathlib import Path

from benchmarks.promises import add_promises, read_promises, shares


def test_parts_add_up(tmp_path: Path) -> None:
    path = tmp_path / "promises.jsonl"
    assert read_promises(path) == []
    add_promises(path, [(1.0, 2.0, 0.5), (1.0, 2.0, 1.5)])
    add_promises(path, [(1.0, 2.0, 3.0)])
    assert read_promises(path) == [(1.0, 2.0, 0.5), (1.0, 2.0, 1.5), (1.0, 2.0, 3.0)]


def test_shares_of_ends() -> None:
    told = [(1.0, 2.0, took_s) for took_s in (0.5, 1.0, 1.5, 2.0, 4.0)]
    assert shares(told) == (
        "5 promises: between p50 and p90 40.0 %, up to p90 80.0 %, median error of p50 0.50 s of 1.50 s"
    )
