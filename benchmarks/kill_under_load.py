"""The effect of a death on 200 clients: ``python -m benchmarks.kill_under_load``.

A service over HTTP on a Ray cluster of four nodes on this machine: components split, two replicas of the embedded
model in float32, each on a node of its own. While all streams are under way, the router, a replica or a node is
killed, or all
that runs on a node is frozen, which no process reports. Each stream must end with the text that it has when nothing
dies; if one does not, the command fails.

Shown are the longest pause within a stream (the median over the streams, and the longest of all) and the time from the
kill until ``/status`` shows every component ready again; no client waits for that.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.streams import Stream, Streams, open_streams, streams_midway
from core.config.load import FarsightConfig, load_config

if TYPE_CHECKING:
    from benchmarks.ray_nodes import Nodes

LATEST_S = 300.0
"""A run that takes longer has got stuck."""

NUM_NODES = 3
"""Beside the head: for two replicas, and for the successor of one."""

HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 3}
"""Ray's settings for the detection of lost nodes, as docs/scaling.md recommends."""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream; the prompts are tried up to 400")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--port", type=int, default=8431)
    return parser.parse_args(words)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one run; times in seconds.

    Attributes:
        gaps_s: The longest pause of each stream.
        num_same: Streams with the same output as without a death.
        ready_s: Seconds until every component was ready again; None if no process was killed.
    """

    victim: str
    gaps_s: list[float]
    num_same: int
    ready_s: float | None = None

    def row(self) -> str:
        ready = "-" if self.ready_s is None else f"{self.ready_s:.2f}"
        same = f"{self.num_same} of {len(self.gaps_s)}"
        return (
            f"{self.victim:12} {same:>12} {statistics.median(self.gaps_s):12.2f} {max(self.gaps_s):12.2f} {ready:>12}"
        )


class Victims:
    """What can be killed."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._frozen = ""

    def router(self, rows: dict[str, dict[str, Any]]) -> None:
        os.kill(rows["router"]["pid"], signal.SIGKILL)

    def replica(self, rows: dict[str, dict[str, Any]]) -> None:
        """Kills a replica: its worker, its scheduler and its KV offload manager."""
        for name in ("worker-0", "scheduler-0", "kv-offload-manager-0"):
            os.kill(rows[name]["pid"], signal.SIGKILL)

    def node(self, rows: dict[str, dict[str, Any]]) -> None:
        """Kills a node that has a replica."""
        self._nodes.kill(self._victim(rows))

    def frozen_node(self, rows: dict[str, dict[str, Any]]) -> None:
        """Freezes such a node: no connection is closed."""
        self._frozen = self._victim(rows)
        self._nodes.freeze(self._frozen)

    def _victim(self, rows: dict[str, dict[str, Any]]) -> str:
        """A node with a replica, that holds no client's connection."""
        homes = {name: self._nodes.of(row["pid"]) for name, row in rows.items()}
        held = {homes[name] for name, row in rows.items() if row["kind"] == "Ingress"}
        workers = {homes[name] for name, row in rows.items() if row["kind"] == "ModelWorker"}
        return min(workers - held - {""})

    def replace(self) -> None:
        """Adds a node for the lost one."""
        if self._frozen:
            self._nodes.kill(self._frozen)
            self._frozen = ""
        while self._nodes.num_others < NUM_NODES:
            self._nodes.add()


async def measure(base_url: str, args: argparse.Namespace, victims: Victims) -> AsyncIterator[Outcome]:
    """The runs, the first without a death."""
    async with open_streams(base_url, args.streams, args.tokens) as streams:
        undisturbed = await streams.finish(LATEST_S)
    yield _outcome("none", undisturbed, undisturbed)
    for _ in range(args.repeats):
        for kill in (victims.router, victims.replica, victims.node, victims.frozen_node):
            async with streams_midway(base_url, args.streams, args.tokens) as streams:
                before = await streams.rows()
                killed_at = time.monotonic()
                await asyncio.to_thread(kill, before)
                ready = asyncio.create_task(_ready_again(streams, before, killed_at))
                each = await streams.finish(LATEST_S)
                yield _outcome(kill.__name__, each, undisturbed, await ready)
            victims.replace()


async def _ready_again(streams: Streams, before: dict[str, dict[str, Any]], killed_at: float) -> float:
    """Seconds from the kill until the same components are ready, of which at least one is another process."""
    components = {name for name, row in before.items() if row["kind"] != "Ingress"}
    async with asyncio.timeout(LATEST_S):
        while True:
            rows = await streams.rows()
            back = all(name in rows and rows[name]["state"] == "ready" for name in components)
            if back and any(rows[name]["pid"] != before[name]["pid"] for name in components):
                return time.monotonic() - killed_at
            await asyncio.sleep(0.1)


def _outcome(victim: str, each: list[Stream], undisturbed: list[Stream], ready_s: float | None = None) -> Outcome:
    gaps_s = [max(b - a for a, b in zip(one.arrived_at, one.arrived_at[1:], strict=False)) for one in each]
    same = [one.done and one.outcome == other.outcome for one, other in zip(each, undisturbed, strict=True)]
    return Outcome(victim, gaps_s, sum(same), ready_s)


async def _show(args: argparse.Namespace, victims: Victims) -> int:
    """How many streams were not as they should be."""
    num_other = 0
    print(f"{'killed':12} {'streams same':>12} {'pause p50 s':>12} {'longest s':>12} {'all ready s':>12}")
    async for outcome in measure(f"http://127.0.0.1:{args.port}", args, victims):
        print(outcome.row(), flush=True)
        num_other += args.streams - outcome.num_same
    return num_other


def _config(args: argparse.Namespace) -> FarsightConfig:
    tables: dict[str, dict[str, Any]] = {
        "model": {"replicas": 2, "dtype": "float32"},
        "engine": {"max_num_seqs": args.streams, "benchmark_mode": True},
        "scheduler": {"placement": "least-work"},
        "actors": {"placement": "split"},
        "server": {"port": args.port, "ingress_replicas": 1, "proxy": "serve"},
    }
    return load_config(None, tables)


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    directory = tempfile.mkdtemp(prefix="farsight-")
    root = str(Path(__file__).resolve().parent.parent)
    # Read when Ray is imported.
    os.environ |= {
        "PYTHONPATH": root,
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": directory,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    }
    import ray

    from actors.runtime.names import NAMESPACE
    from benchmarks.ray_nodes import Nodes
    from services.launch.launch import Service, find_model, find_site
    from services.launch.stages import silent_stages

    config = _config(args)
    nodes = Nodes(NUM_NODES, HEALTH)
    try:
        ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        Service(find_site(config, find_model(config))).start(silent_stages(config.server.start_patience_s))
        num_other = asyncio.run(_show(args, Victims(nodes)))
    finally:
        ray.shutdown()
        nodes.end()
        shutil.rmtree(directory, ignore_errors=True)
    if num_other:
        raise SystemExit(f"{num_other} streams differ from the streams of a run without a death")


if __name__ == "__main__":
    main()
