"""Two tenants of one server on an emulated device, each with a key of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.common.servers import RunningServer, ServerCommand, emulated_device, farsight_command
from benchmarks.fair_shares.simulated import MAX_P99_RATIO, MIN_THROUGHPUT, NEIGHBOUR
from benchmarks.overload import PLACES, PROFILE, Clients, Run
from farsight.services.api.access.key_file import KeyFile, changed_key_file
from farsight.services.api.access.keys import Role, make_key

CAPACITY_S = 10.0
READY_S = 300.0
IDLE_S = 2.0
"""Seconds after a run in which the server drops what was still in flight."""

_TOKENS = "vllm:generation_tokens_total"


@dataclass(frozen=True, slots=True)
class Beside:
    """The small tenant beside a neighbour.

    Attributes:
        num_done, num_left: Its requests that ended, and those that were cut off.
        ttft_p99_s, jct_p99_s: 99th percentiles of those that ended, in seconds.
        tokens_per_s: Both tenants' output.
    """

    num_done: int
    num_left: int
    ttft_p99_s: float
    jct_p99_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class LiveShares:
    """Beside a neighbour of its own load, and beside ten times its load: with fair shares, and as one tenant."""

    capacity: float
    equal: Beside
    flood: Beside
    unfair: Beside

    @property
    def ratio(self) -> float:
        return self.flood.jct_p99_s / self.equal.jct_p99_s

    @property
    def throughput(self) -> float:
        return self.flood.tokens_per_s / self.unfair.tokens_per_s

    @property
    def holds(self) -> bool:
        return self.ratio <= MAX_P99_RATIO and self.throughput >= MIN_THROUGHPUT

    def summary(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ratio": self.ratio, "throughput": self.throughput}

    def text(self) -> str:
        lines = [f"capacity: {self.capacity:.1f} requests/s"]
        for name, each in (("equal", self.equal), ("10 x", self.flood), ("10 x, one tenant", self.unfair)):
            lines.append(
                f"{name}: {each.num_done} requests of the small tenant and {each.num_left} left, first token p99 "
                f"{each.ttft_p99_s:.2f} s, JCT p99 {each.jct_p99_s:.2f} s; {each.tokens_per_s:.1f} tokens/s of both"
            )
        verdict = "holds" if self.holds else "MISSED"
        return "\n".join([*lines, f"{verdict}: ratio {self.ratio:.2f}, throughput {self.throughput:.3f}"])


def measure(load: float, seconds: float, seed: int, serve_options: Sequence[str]) -> LiveShares:
    """Three runs on one server.

    Args:
        load: The small tenant's, as a share of the measured capacity.
    """
    with tempfile.TemporaryDirectory(prefix="farsight-shares-") as name:
        folder = Path(name)
        keys = _make_keys(folder / "keys.json")
        server = RunningServer(_command(folder, serve_options), folder / "server.log")
        try:
            server.wait_until_ready(READY_S)
            return uvloop.run(_measure(server.command.port, keys, load, seconds, seed))
        finally:
            print(f"server ended: {server.stop()}", file=sys.stderr)


async def _measure(port: int, keys: dict[str, str], load: float, seconds: float, seed: int) -> LiveShares:
    small, neighbour = Clients(port, seed, keys["small"]), Clients(port, seed + 1, keys["neighbour"])
    same = Clients(port, seed + 1, keys["small"])
    try:
        await neighbour.capacity(CAPACITY_S / 2)  # code is warm
        capacity = await neighbour.capacity(CAPACITY_S)
        rate = load * capacity
        found = []
        for other, factor in ((neighbour, 1), (neighbour, NEIGHBOUR), (same, NEIGHBOUR)):
            found.append(await _beside(port, keys["watcher"], (small, rate), (other, factor * rate), seconds))
            await asyncio.sleep(IDLE_S)
    finally:
        for each in (small, neighbour, same):
            await each.close()
    return LiveShares(capacity, *found)


async def _beside(
    port: int, key: str, small: tuple[Clients, float], other: tuple[Clients, float], seconds: float
) -> Beside:
    """Arrivals end after so many seconds, and requests after as many again, or once the small tenant is done."""
    run, rest = Run(small[1]), Run(other[1])
    flooding = asyncio.create_task(other[0].arrivals(rest, seconds))
    before = await asyncio.to_thread(_num_tokens, port, key)
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks = await small[0].arrivals(run, seconds)
    tokens_per_s = (await asyncio.to_thread(_num_tokens, port, key) - before) / (loop.time() - began)
    _, left = await asyncio.wait(tasks, timeout=seconds) if tasks else ((), ())
    for task in [*left, *await flooding]:
        task.cancel()
    jcts = sorted(wait + after for wait, after in zip(run.waits, run.rests, strict=True))
    waits = sorted(run.waits)
    last = int(0.99 * (len(jcts) - 1))
    return Beside(len(jcts), len(left), waits[last], jcts[last], tokens_per_s)


def _num_tokens(port: int, key: str) -> float:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_TOKENS))


def _make_keys(path: Path) -> dict[str, str]:
    roles = {"small": Role.SERVE, "neighbour": Role.SERVE, "watcher": Role.OBSERVE}
    made = {name: make_key(name, name, [role], 0.0) for name, role in roles.items()}
    with changed_key_file(path) as content:
        content[0] = KeyFile(tuple(record for _, record in made.values()))
    return {name: key for name, (key, _) in made.items()}


def _command(folder: Path, options: Sequence[str]) -> ServerCommand:
    (folder / "config.toml").write_text(f"[engine]\nmax_num_seqs = {PLACES}\n")
    words = ["--config", str(folder / "config.toml"), "--key-file", str(folder / "keys.json")]
    return farsight_command(None, [*words, *emulated_device(folder, PROFILE), *options])
