"""A service at three times its capacity, with a limit of waiting: ``python -m benchmarks.overload``.

Measures the capacity (requests a second with every place taken), then how requests fare at 0.9 of it, then at
``--factor`` times it, in an open loop with arrivals by a Poisson process. Prints how long accepted requests waited
for their first token, how long they took after it, how fast the others were refused, and the memory of all processes
of the server. Exits with 1 if a limit is exceeded or an answer is the server's own fault.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.common.servers import RunningServer, ServerCommand, emulated_device, free_port
from farsight.services.bench.report import provenance, write_json
from farsight.services.launch.launch import EMBEDDED_NAME

PROGRAM = ("python", "-m", "benchmarks.overload")
PROFILE = {
    "base_s": 0.02,
    "prefill_token_s": 0.0001,
    "decode_seq_s": 0.0002,
    "context_token_s": 0.0,
    "kv_bytes": 1024,
    "copy_bandwidth": 1e8,
}
"""Profile of a device that is the bottleneck: a step of 16 sequences takes 23 ms."""

PLACES = 16
MEAN_TOKENS, MAX_TOKENS = 40, 200
MEMORY_S = 1.0
"""Seconds between two looks at the memory."""

CLIENTS_NICE = -10

LAG_S = 0.01
"""Seconds between two looks at the clients' event loop."""

MAX_WAIT_S = 2.0
MOST_WAIT_S = 2.5
MOST_STRETCH = 1.5
MOST_REFUSAL_S = 0.1
MOST_GROWTH = 1.1


@dataclass
class Run:
    """What clients saw.

    Attributes:
        waits: Seconds to the first token, of requests that were accepted.
        rests: Seconds from the first token to the end.
        refusals: Seconds to the answer 429.
        memory: Bytes of all processes of the server, once a second.
        lags: Seconds by which the clients' own event loop was late, which every other figure holds as well.
    """

    rate: float
    waits: list[float] = field(default_factory=list)
    rests: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    retry_after: list[float] = field(default_factory=list)
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    memory: list[int] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "statuses": dict(self.statuses),
            "wait_s": _percentiles(self.waits),
            "rest_s": _percentiles(self.rests) | {"mean": _mean(self.rests)},
            "refusal_s": _percentiles(self.refusals),
            "retry_after_s": _percentiles(self.retry_after),
            "memory_growth": self.memory_growth,
            "client_lag_s": _percentiles(self.lags),
            "wait_p99_s_by_tenth": _by_tenth(self.waits),
            "refusal_p99_s_by_tenth": _by_tenth(self.refusals),
        }

    @property
    def memory_growth(self) -> float:
        """Memory of the last fifth over that of the second."""
        fifth = len(self.memory) // 5
        return _mean(self.memory[-fifth:]) / _mean(self.memory[fifth : 2 * fifth]) if fifth else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: ordered[int(share * (len(ordered) - 1))] if ordered else 0.0 for name, share in _SHARES.items()}


def _by_tenth(values: Sequence[float]) -> list[float]:
    """The 99th percentiles of ten parts of equal number, in order of the answers: shows how a run begins."""
    edges = [len(values) * tenth // 10 for tenth in range(11)]
    return [_percentiles(values[first:end])["p99"] for first, end in itertools.pairwise(edges)]


_SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


class Clients:
    """Sends completions whose lengths are drawn: mostly short, some long.

    Args:
        key: API key; empty where none is needed.
    """

    def __init__(self, port: int, seed: int, key: str = "") -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._draw = random.Random(seed)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=600),
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )

    async def close(self) -> None:
        await self._session.close()

    async def one(self, run: Run) -> None:
        """One request; its outcome is noted."""
        words = " ".join(f"w{self._draw.randrange(10**6)}" for _ in range(self._draw.randrange(2, 40)))
        tokens = max(1, min(MAX_TOKENS, round(self._draw.expovariate(1 / MEAN_TOKENS))))
        body = {"model": EMBEDDED_NAME, "prompt": words, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        began, first = time.perf_counter(), None
        try:
            async with self._session.post(self._url, json=body) as reply:
                if reply.status != 200:
                    await reply.read()
                    run.statuses[str(reply.status)] += 1
                    if reply.status == 429:
                        run.refusals.append(time.perf_counter() - began)
                        run.retry_after.append(float(reply.headers["Retry-After"]))
                    return
                last = b""
                async for line in reply.content:
                    if line.startswith(b"data: "):
                        first = first or time.perf_counter()
                        last = line
        except aiohttp.ClientError as error:
            run.statuses[type(error).__name__] += 1
            return
        if first is None or last.strip() != b"data: [DONE]":
            run.statuses["cut off"] += 1
            return
        run.statuses["200"] += 1
        run.waits.append(first - began)
        run.rests.append(time.perf_counter() - first)

    async def capacity(self, seconds: float) -> float:
        """Requests a second with twice as many clients as places, none of whom pauses."""
        run = Run(0.0)
        end = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                await self.one(run)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(2 * PLACES)))
        return run.statuses["200"] / (time.perf_counter() - began)

    async def load(self, rate: float, seconds: float, root: psutil.Process) -> Run:
        """An open loop: arrivals wait for no answer."""
        run = Run(rate)
        watching = [asyncio.create_task(_watch_memory(run, root)), asyncio.create_task(_watch_lag(run))]
        tasks = await self.arrivals(run, seconds)
        for each in watching:
            each.cancel()
        await asyncio.gather(*tasks)
        return run

    async def arrivals(self, run: Run, seconds: float) -> list[asyncio.Task[None]]:
        """Requests at the rate of the run for so long; returns those that have not ended."""
        tasks: set[asyncio.Task[None]] = set()
        due, end = time.perf_counter(), time.perf_counter() + seconds
        while due < end:
            due += self._draw.expovariate(run.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(self.one(run))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return list(tasks)


async def _watch_lag(run: Run) -> None:
    while True:
        due = time.perf_counter() + LAG_S
        await asyncio.sleep(LAG_S)
        run.lags.append(time.perf_counter() - due)


async def _watch_memory(run: Run, root: psutil.Process) -> None:
    while True:
        run.memory.append(await asyncio.to_thread(_memory, root))
        await asyncio.sleep(MEMORY_S)


def _memory(root: psutil.Process) -> int:
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue  # it has just ended
    return total


def faults(light: Run, heavy: Run) -> list[str]:
    """What exceeds its limit."""
    found = []
    wait, refusal = _percentiles(heavy.waits), _percentiles(heavy.refusals)
    if wait["p99"] > MOST_WAIT_S:
        found.append(f"accepted requests waited {wait['p99']:.2f} s (p99), limit {MOST_WAIT_S} s")
    stretch = _mean(heavy.rests) / max(1e-9, _mean(light.rests))
    if stretch > MOST_STRETCH:
        found.append(f"accepted requests took {stretch:.2f} times as long as at 0.9, limit {MOST_STRETCH}")
    if refusal["p99"] > MOST_REFUSAL_S:
        found.append(f"refusals took {1e3 * refusal['p99']:.0f} ms (p99), limit {1e3 * MOST_REFUSAL_S:.0f} ms")
    if heavy.memory_growth > MOST_GROWTH:
        found.append(f"memory grew by {100 * (heavy.memory_growth - 1):.0f} %")
    wrong = {status: num for run in (light, heavy) for status, num in run.statuses.items() if status not in _RIGHT}
    return [*found, f"answers {wrong}"] if wrong else found


_RIGHT = ("200", "429")


async def measure(port: int, root: psutil.Process, args: argparse.Namespace) -> tuple[Run, Run]:
    clients = Clients(port, args.seed)
    try:
        await clients.capacity(args.capacity_s / 2)  # steps are measured, code is warm
        capacity = await clients.capacity(args.capacity_s)
        print(f"capacity: {capacity:.1f} requests/s", flush=True)
        light = await clients.load(0.9 * capacity, min(60.0, args.duration), root)
        _show("0.9 of it", light)
        heavy = await clients.load(args.factor * capacity, args.duration, root)
        _show(f"{args.factor:g} times it", heavy)
    finally:
        await clients.close()
    return light, heavy


def _show(name: str, run: Run) -> None:
    wait, refusal = _percentiles(run.waits), _percentiles(run.refusals)
    print(
        f"{name}: {run.rate:.1f} requests/s, {dict(run.statuses)}; first token after {wait['p50']:.2f} s, p99 "
        f"{wait['p99']:.2f} s, max {wait['max']:.2f} s; the rest {_mean(run.rests):.2f} s in the mean; refused within "
        f"{1e3 * refusal['p50']:.0f} ms, p99 {1e3 * refusal['p99']:.0f} ms; memory x "
        f"{run.memory_growth:.3f}; clients late by {1e3 * _percentiles(run.lags)['p99']:.0f} ms (p99)",
        flush=True,
    )


def _go_first() -> None:
    """Clients stand for other machines: where this process may, it does not wait for the server's processors."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, CLIENTS_NICE)


def _spin() -> None:
    while True:
        pass


def main() -> int:
    args = _parse()
    folder = Path(tempfile.mkdtemp(prefix="farsight-overload-"))
    server = RunningServer(_command(folder, args), folder / "server.log")
    print(f"server log: {folder / 'server.log'}", file=sys.stderr)
    spinning = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(args.busy)]
    try:
        server.wait_until_ready(args.ready_timeout)
        for each in spinning:
            each.start()
        _go_first()
        light, heavy = uvloop.run(measure(server.command.port, psutil.Process(server.pid), args))
    finally:
        for each in spinning:
            each.kill()
        end = server.stop()
    found = faults(light, heavy)
    for fault in found:
        print(f"FAILED: {fault}")
    figures = {"light": light.summary(), "heavy": heavy.summary(), "faults": found, "busy": args.busy}
    write_json(args.json, {**provenance(PROGRAM), **figures, "end": end})
    return 1 if found else 0


def _command(folder: Path, args: argparse.Namespace) -> ServerCommand:
    limits = "max_queued_requests = 100000\nmax_queued_tokens = 100000000\n"
    (folder / "config.toml").write_text(
        f"[server]\nmax_wait_s = {MAX_WAIT_S}\n{limits}[engine]\nmax_num_seqs = {PLACES}\n"
    )
    port = free_port()
    words = [sys.executable, "-m", "farsight.services.cli", "serve", "--port", str(port)]
    words += ["--config", str(folder / "config.toml")]
    if not args.real:
        words += emulated_device(folder, PROFILE)
    return ServerCommand([*words, *args.serve_options], port, EMBEDDED_NAME)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of overload")
    parser.add_argument("--capacity-s", type=float, default=20.0, help="seconds in which the capacity is measured")
    parser.add_argument("--factor", type=float, default=3.0, help="load, in capacities")
    parser.add_argument("--busy", type=int, default=0, help="processes beside it that compute without a pause")
    parser.add_argument("--real", action="store_true", help="the embedded model in place of an emulated device")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ready-timeout", type=float, default=180.0, help="seconds")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("serve_options", nargs="*", help="after --: more arguments of farsight serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
