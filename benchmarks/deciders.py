"""How soon decisions go on when who makes them dies, moves or is scaled: ``python -m benchmarks.deciders``.

A server over HTTP with every component in a process of its own and the embedded model in float32. Under
``fastserve`` the pool of KV is too small for the streams, and the KVOffloadManager says whose KV moves. Under
``magnus`` idle workers pull batches, whose order follows the ServingTimeEstimator. In the middle of a load:

- ``kill``: SIGKILL to the process of the component;
- ``move``: SIGKILL to everything that moves with it, and what it did is done elsewhere. With the manager its whole
  replica, whose streams go to the other replica and its manager; of two estimators the one that answered alone before;
- ``scale``: from two replicas, each with its manager, to one and back; from one estimator to two and back.

Printed: seconds until the next decision, the longest time without one while requests wait or have KV to move, and the
streams with the same output as in the run without a disturbance. The command fails if a stream differs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.servers import RunningServer, farsight_command
from benchmarks.common.streams import LONG_S, Stream, Streams, eventually, open_streams
from services.run_file import ADMIN_TOKEN_VARIABLE

ADMIN_TOKEN = "benchmark"
"""Opens the administration of a server on the loopback interface that ends with this command."""

POLL_S = 0.02
READY_S = 180.0

SHARED = """
[model]
dtype = "float32"

[actors]
placement = "split"

[server]
ingress_replicas = 1
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A component and the load under which it decides.

    Attributes:
        decisions: The counter of its decisions in ``/metrics``, summed over all labels.
        dies_with: Components that are killed with it where it moves.
        scaled: Its kind in ``/admin/scale``, another count of it and the usual one.
        num_streams, num_tokens: Sizes of the load; short batches where each is a decision.
    """

    component: str
    config: str
    decisions: str
    dies_with: tuple[str, ...]
    scaled: tuple[str, int, int]
    num_streams: int
    num_tokens: int


CASES = (
    Case(
        "kv-offload-manager-0",
        SHARED.replace("[model]", "[model]\nreplicas = 2")
        + '[engine]\nkv_memory = "3MiB"\nhost_kv_memory = "64MiB"\nmax_num_seqs = 8\nspeculation = "off"\n'
        + '[scheduler]\npreset = "fastserve"\n',
        "farsight:offload_decisions_total",
        ("worker-0", "scheduler-0"),
        ("replica", 1, 2),
        24,
        400,
    ),
    Case(
        "serving-time-estimator-0",
        SHARED + '[engine]\nmax_num_seqs = 4\nspeculation = "off"\n[scheduler]\npreset = "magnus"\n',
        "farsight:batch_size_count",
        (),
        ("serving-time-estimator", 2, 1),
        160,
        60,
    ),
)


@dataclass
class Outcome:
    """Results of one run; seconds. ``decided_at``: monotonic instants at which the counter was seen to have risen."""

    disturbance: str
    disturbed_at: float = 0.0
    decided_at: list[float] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    @property
    def next_s(self) -> float:
        """From the disturbance to the next decision; infinity if there was none."""
        return min((at - self.disturbed_at for at in self.decided_at if at > self.disturbed_at), default=float("inf"))

    @property
    def longest_s(self) -> float:
        """The longest time between two decisions, from the one before the disturbance on."""
        before = [at for at in self.decided_at if at <= self.disturbed_at][-1:]
        times = [*before, *(at for at in self.decided_at if at > self.disturbed_at)]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


class Run:
    """One load and what happens to it."""

    def __init__(self, case: Case, streams: Streams) -> None:
        self._case = case
        self._streams = streams

    async def num_decisions(self) -> float:
        """By the server's counter; a process that has just started begins at 0."""
        async with self._streams.session.get("/metrics") as reply:
            families = text_string_to_metric_families(await reply.text())
        samples = (sample for family in families for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == self._case.decisions)

    async def watch(self, decided_at: list[float]) -> None:
        """Notes the instants of decisions until it is cancelled. A successor's count that is lower is none."""
        last = await self.num_decisions()
        while True:
            count = await self.num_decisions()
            if count > last:
                decided_at.append(time.monotonic())
            last = count
            await asyncio.sleep(POLL_S)

    async def kill(self) -> None:
        await self._kill(self._case.component)

    async def move(self) -> None:
        kind, other, _ = self._case.scaled
        if not self._case.dies_with:
            await self._scale(kind, other)
        await self._kill(self._case.component, *self._case.dies_with)

    async def scale(self) -> None:
        kind, other, usual = self._case.scaled
        await self._scale(kind, other)
        await self._scale(kind, usual)

    async def restore(self) -> None:
        """As many as at the start."""
        kind, _, usual = self._case.scaled
        await self._scale(kind, usual)

    async def _kill(self, *names: str) -> None:
        rows = await self._streams.rows()
        for pid in {rows[name]["pid"] for name in names}:
            os.kill(pid, signal.SIGKILL)

    async def _scale(self, kind: str, count: int) -> None:
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        body = {"kind": kind, "count": count}
        async with self._streams.session.post("/admin/scale", json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()


async def disturbed(base_url: str, case: Case, args: argparse.Namespace, name: str) -> Outcome:
    """One load, disturbed after its third decision."""
    outcome = Outcome(name)
    async with open_streams(base_url, case.num_streams, case.num_tokens) as streams:
        run = Run(case, streams)
        watching = asyncio.create_task(run.watch(outcome.decided_at))
        try:
            await eventually(lambda: len(outcome.decided_at) >= args.after)
            outcome.disturbed_at = time.monotonic()
            acts: dict[str, Callable[[], Awaitable[None]]] = {"kill": run.kill, "move": run.move, "scale": run.scale}
            if name in acts:
                await acts[name]()
            outcome.streams = await streams.finish(LONG_S)
            await run.restore()
        finally:
            watching.cancel()
    await _settled(base_url, case)
    return outcome


async def _settled(base_url: str, case: Case) -> None:
    """Until the component is ready again, so that the next run begins as this one did."""
    async with open_streams(base_url, 0, 1) as none:
        async with asyncio.timeout(LONG_S):
            while True:
                rows = await none.rows()
                if case.component in rows and all(row["state"] == "ready" for row in rows.values()):
                    return
                await asyncio.sleep(0.2)


async def measure(base_url: str, case: Case, args: argparse.Namespace) -> int:
    """Prints a line for each disturbance; returns how many streams were not as without one."""
    num_other = 0
    undisturbed: list[Stream] = []
    for name in ("none", "kill", "move", "scale"):
        outcome = await disturbed(base_url, case, args, name)
        undisturbed = undisturbed or outcome.streams
        same = [a.done and a.outcome == b.outcome for a, b in zip(outcome.streams, undisturbed, strict=True)]
        num_other += len(same) - sum(same)
        print(_row(case, outcome, f"{sum(same)} of {len(same)}"), flush=True)
    return num_other


def _row(case: Case, outcome: Outcome, same: str) -> str:
    times = f"{outcome.next_s:16.2f} {outcome.longest_s:12.2f}"
    return f"{case.component:26} {outcome.disturbance:8} {len(outcome.decided_at):10} {times} {same:>12}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--after", type=int, default=3, help="decisions before the disturbance")
    parser.add_argument("--only", choices=[case.component for case in CASES])
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    os.environ[ADMIN_TOKEN_VARIABLE] = ADMIN_TOKEN
    num_other = 0
    heads = ("disturbed", "how", "decisions", "next decision s", "longest s", "streams same")
    print("{:26} {:8} {:>10} {:>16} {:>12} {:>12}".format(*heads))
    for case in CASES:
        if args.only in (None, case.component):
            with tempfile.TemporaryDirectory(prefix="farsight-") as directory:
                num_other += _serve(case, args, Path(directory))
    if num_other:
        raise SystemExit(f"{num_other} streams differ from the streams of a run without a disturbance")


def _serve(case: Case, args: argparse.Namespace, directory: Path) -> int:
    config = directory / "server.toml"
    config.write_text(case.config + f'\n[log]\npath = "{directory / "log.sqlite"}"\n')
    server = RunningServer(farsight_command(None, ["--config", str(config)]), directory / "server.log")
    try:
        server.wait_until_ready(READY_S)
        return asyncio.run(measure(server.command.base_url, case, args))
    except BaseException:
        print(server.log.read_text("utf-8", errors="replace")[-3000:])
        raise
    finally:
        ended: dict[str, Any] = server.stop()
        assert not ended["left_behind"], ended


if __name__ == "__main__":
    main()
