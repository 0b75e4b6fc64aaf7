"""Placement by prefix beside round-robin: ``python -m benchmarks.live_prefixes``.

Each run is a service in one process: real components and messages, 4 or 8 emulated replicas that take the time of
Mistral-7B on an A6000, prompts with equal beginnings, requests that come at given times. Round-robin has the same
prefix caches. Every claim is measured on paired seeds and beside the simulator; the oracle partition is simulated only.
Results are kept in a file: the same command again goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.live_prefixes.setups import SETUPS, SHARED, SYSTEMS
from benchmarks.live_presets import command
from benchmarks.live_presets.claims import Claim
from benchmarks.live_presets.study import Study

ABLATION = ("E2", "+ rebalance, autoscale", "+ prefill/decode balance", "preble")


def _beside_round_robin(setup: str) -> list[Claim]:
    return [
        Claim(f"{setup}: preble / round-robin, mean", setup, "preble", "round-robin", "jct_s", 0.67),
        Claim(f"{setup}: preble / round-robin, p99", setup, "preble", "round-robin", "p99_jct_s", 0.5),
        Claim(f"{setup}: preble / oracle, hits", setup, "preble", "oracle partition", "hit_rate", 0.9, at_most=False),
    ]


def _beside_preble(setup: str) -> list[Claim]:
    return [
        Claim(f"{setup}: farsight-mean / preble, {name}", setup, "farsight-mean", "preble", metric, 1.0)
        for metric, name in (("jct_s", "mean"), ("p99_jct_s", "p99"))
    ]


def _ablation(setup: str) -> list[Claim]:
    steps = [("E2", "round-robin"), *zip(ABLATION[1:], ABLATION, strict=False)]
    return [
        Claim(f"{setup}: {ours} / {base}, {name}", setup, ours, base, metric, 1.0)
        for ours, base in steps
        for metric, name in (("jct_s", "mean"), ("p99_jct_s", "p99"))
    ]


CLAIMS = (
    *(claim for setup in SHARED for claim in _beside_round_robin(setup)),
    *(claim for setup in SETUPS for claim in _beside_preble(setup)),
    *_ablation("tools, 4"),
)

STUDY = Study(__doc__ or "", CLAIMS, SETUPS, SYSTEMS, Path("build/live_prefixes.jsonl"))


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures what is missing, prints and returns the rows."""
    return command.main(STUDY, words)


if __name__ == "__main__":
    main()
