"""Past-Future's Figure 9 on what runs here: ``python -m benchmarks.frameworks REPORT.json ...`` prints its rows.

Each report is what ``python -m benchmarks.peers --json REPORT.json`` wrote: Farsight beside one other framework, by
turns, on one model, with as many KV tokens and compute threads each, and the same closed loop of clients. The paper
compares LightLLM with vLLM, TGI, DeepSpeed-MII and TensorRT-LLM on GPUs; of these vLLM alone computes on a processor,
and ``transformers serve`` stands in for the others. Both count as frameworks of their own here: absolute numbers cannot
be those of the paper.

For the pages of results write them to ``past_future_frameworks.jsonl`` and pass it to ``python -m lab.papers``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.reproduce.rows import Draws, Exempt, OrderCheck, Row

NAME = "past_future_frameworks"
GOODPUT, THROUGHPUT = "goodput_requests_per_s", "output_tokens_per_s"
DRAWN = Exempt("drawn in the figure, not printed, and on other hardware")


def rows(report: dict[str, Any]) -> Iterator[Row]:
    """The curves of both servers, and at each load whether Farsight's goodput is the larger one, as the paper's is."""
    for case in report["cases"]:
        clients = case["load"]
        found = {each["label"]: each["runs"] for each in case["targets"]}
        peer, ours = report["peer"], "farsight"
        values = {label: {name: _mean(runs, name) for name in (GOODPUT, THROUGHPUT)} for label, runs in found.items()}
        for label in (peer, ours):
            who = f"{label} beside {ours if label == peer else peer}"
            yield Row(NAME, f"{clients} clients, {who}", "goodput, requests/s", DRAWN, values[label][GOODPUT])
            yield Row(NAME, f"{clients} clients, {who}", "output tokens/s", DRAWN, values[label][THROUGHPUT])
        more = values[ours][GOODPUT] - values[peer][GOODPUT]
        order, note = OrderCheck(more > 0, bound=0.0), "order: the goodput of Past-Future's framework is the largest"
        pairs = zip(found[ours], found[peer], strict=False)
        by_run = tuple(_mean([mine], GOODPUT) - _mean([theirs], GOODPUT) for mine, theirs in pairs)
        metric, drawn = "goodput, Farsight less it, requests/s", Draws(len(by_run), by_run)
        yield Row(NAME, f"{clients} clients, over {peer}", metric, order, more, note, drawn)


def _mean(runs: list[dict[str, Any]], name: str) -> float:
    return sum(float(run["metrics"][name]) for run in runs) / len(runs)


def main() -> None:
    for path in sys.argv[1:]:
        for row in rows(json.loads(Path(path).read_text("utf-8"))):
            print(json.dumps(row.as_dict()))


if __name__ == "__main__":
    main()
