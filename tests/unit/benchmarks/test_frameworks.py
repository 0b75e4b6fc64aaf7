"""Rows of Past-Future's Figure 9 from reports of ``benchmarks.peers``."""

from __future__ import annotations

from benchmarks.frameworks import GOODPUT, THROUGHPUT, rows


def target(label: str, goodput: float, num_runs: int = 3) -> dict[str, object]:
    return {"label": label, "runs": [{"metrics": {GOODPUT: goodput, THROUGHPUT: 100.0}}] * num_runs}


def test_the_larger_goodput_is_ours_or_not() -> None:
    report = {
        "peer": "vllm",
        "cases": [
            {"load": 8, "targets": [target("vllm", 1.0), target("farsight", 2.0)]},
            {"load": 24, "targets": [target("vllm", 2.0), target("farsight", 1.0)]},
        ],
    }
    found = {(row.setting, row.metric): row for row in rows(report)}
    assert len(found) == 10
    assert found["8 clients, over vllm", "goodput, Farsight less it, requests/s"].ours == 1.0
    verdicts = [
        found[f"{clients} clients, over vllm", "goodput, Farsight less it, requests/s"].verdict for clients in (8, 24)
    ]
    assert verdicts == ["ok", "off"]


def test_a_peer_that_meets_no_bound_is_behind() -> None:
    report = {"peer": "x", "cases": [{"load": 1, "targets": [target("x", 0.0), target("farsight", 0.5)]}]}
    assert list(rows(report))[-1].verdict == "ok"
    once = {"peer": "x", "cases": [{"load": 1, "targets": [target("x", 0.0, 1), target("farsight", 0.5, 1)]}]}
    assert list(rows(once))[-1].verdict == "open", "one run tells no order"
