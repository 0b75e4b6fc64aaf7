"""Whether live promises of ends hold: ``python -m benchmarks.promises``.

An emulated A100 with a 7B model, 16 places, requests of log-normal lengths that no policy is told, arrivals by a
Poisson process at ``--load`` of the capacity that this command measures first. Prints the share of ends between the
headers ``farsight-eta-p50`` and ``farsight-eta-p90``, and up to the second, as the client saw them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.common.servers import RunningServer, ServerCommand, free_port
from services.launch.launch import EMBEDDED_NAME

PLACES = 16
MEDIAN_LEN, SIGMA, MAX_LEN = 60, 0.8, 512
READY_S = 180.0

Told = tuple[float, float, float]
"""p50, p90 and the true seconds of one request."""


class PromiseClients:
    """Sends requests and keeps what each was told."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = f"{url}/v1/completions"
        self._draw = random.Random(seed)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self.told: list[Told] = []
        self.num_silent = 0

    async def close(self) -> None:
        await self._session.close()

    async def one(self) -> None:
        prompt = " ".join(f"w{self._draw.randrange(10**6)}" for _ in range(self._draw.randrange(2, 40)))
        length = max(1, min(MAX_LEN, round(self._draw.lognormvariate(float(np.log(MEDIAN_LEN)), SIGMA))))
        body = {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": MAX_LEN, "benchmark_len": length}
        began = time.perf_counter()
        async with self._session.post(self._url, json=body | {"stream": True}) as reply:
            await reply.read()
            reply.raise_for_status()
            if "farsight-eta-p50" not in reply.headers:
                self.num_silent += 1
                return
            p50_s, p90_s = (float(reply.headers[f"farsight-eta-{name}"]) for name in ("p50", "p90"))
            self.told.append((p50_s, p90_s, time.perf_counter() - began))

    async def capacity(self, seconds: float) -> float:
        """Requests a second with all places taken."""
        end, num = time.perf_counter() + seconds, 0

        async def client() -> None:
            nonlocal num
            while time.perf_counter() < end:
                await self.one()
                num += 1

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(2 * PLACES)))
        return num / (time.perf_counter() - began)

    async def load(self, rate: float, num: int) -> None:
        tasks, due = [], time.perf_counter()
        for _ in range(num):
            due += self._draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.one()))
        await asyncio.gather(*tasks)


async def measure(url: str, args: argparse.Namespace) -> None:
    clients = PromiseClients(url, args.seed)
    try:
        capacity = await clients.capacity(args.capacity_s)
        clients.told.clear()
        clients.num_silent = 0
        await clients.load(args.load * capacity, args.requests)
    finally:
        await clients.close()
    told: NDArray[np.float64] = np.array(clients.told)
    p50_s, p90_s, took_s = told.T
    band = float(((took_s > p50_s) & (took_s <= p90_s)).mean())
    up_to_p90, error_s = float((took_s <= p90_s).mean()), float(np.median(np.abs(took_s - p50_s)))
    print(
        f"{args.load:g} of {capacity:.1f} requests/s, preset {args.preset}: {len(told)} promises, "
        f"{clients.num_silent} answers without; between p50 and p90 {100 * band:.1f} %, up to p90 "
        f"{100 * up_to_p90:.1f} %, median error of p50 {error_s:.2f} s of {float(np.median(took_s)):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promises", description="Coverage of live promises.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.9, help="share of the measured capacity (default: 0.9)")
    parser.add_argument("--preset", default="fcfs")
    parser.add_argument("--capacity-s", type=float, default=20.0, help="seconds of measuring the capacity")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder, port = Path(tempfile.mkdtemp(prefix="farsight-promises-")), free_port()
    (folder / "config.toml").write_text(f"[server]\nmax_wait_s = 0.0\n[engine]\nmax_num_seqs = {PLACES}\n")
    words = ["-m", "services.cli", "serve", "--device", "emulated:a100-7b", "--preset", args.preset, "--benchmark-mode"]
    words += ["--port", str(port), "--config", str(folder / "config.toml"), "--max-model-len", "2048"]
    server = RunningServer(ServerCommand([sys.executable, *words], port, EMBEDDED_NAME), folder / "server.log")
    try:
        server.wait_until_ready(READY_S)
        asyncio.run(measure(server.command.base_url, args))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
