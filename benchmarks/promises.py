"""Whether live promises of ends hold: ``python -m benchmarks.promises``.

An emulated A100 with a 7B model, or a real model (``--model DIR``), 16 places, requests of log-normal lengths that no
policy is told, arrivals by a Poisson process at ``--load`` of the capacity that this command measures first. Prints the
share of ends between the headers ``farsight-eta-p50`` and ``farsight-eta-p90``, and up to the
second, as the client saw them.

With ``--results FILE`` a long measurement runs in parts: each call starts a server, measures its capacity, adds its
promises to the file, and prints the shares of all promises in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.common.servers import RunningServer, ServerCommand, free_port
from farsight.services.launch.launch import EMBEDDED_NAME

PLACES = 16
MEDIAN_LEN, SIGMA, MAX_LEN = 60, 0.8, 512
READY_S = 180.0
REAL_NAME = "measured"

Told = tuple[float, float, float]
"""p50, p90 and the true seconds of one request."""


class PromiseClients:
    """Sends requests and keeps what each was told."""

    def __init__(self, url: str, seed: int, model: str = EMBEDDED_NAME) -> None:
        self._model = model
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
        body = {"model": self._model, "prompt": prompt, "max_tokens": MAX_LEN, "benchmark_len": length}
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


async def measure(url: str, args: argparse.Namespace, seed: int) -> tuple[list[Told], str]:
    """The promises of one part, and at which load they were made."""
    clients = PromiseClients(url, seed, served_name(args))
    try:
        capacity = await clients.capacity(args.capacity_s)
        clients.told.clear()
        clients.num_silent = 0
        await clients.load(args.load * capacity, args.requests)
    finally:
        await clients.close()
    load = f"{args.load:g} of {capacity:.1f} requests/s, preset {args.preset}, {clients.num_silent} answers without"
    return clients.told, load


def shares(promises: Sequence[Told]) -> str:
    """How well promises held."""
    told: NDArray[np.float64] = np.array(promises)
    p50_s, p90_s, took_s = told.T
    band = float(((took_s > p50_s) & (took_s <= p90_s)).mean())
    up_to_p90, error_s = float((took_s <= p90_s).mean()), float(np.median(np.abs(took_s - p50_s)))
    return (
        f"{len(told)} promises: between p50 and p90 {100 * band:.1f} %, up to p90 {100 * up_to_p90:.1f} %, "
        f"median error of p50 {error_s:.2f} s of {float(np.median(took_s)):.2f} s"
    )


def read_promises(path: Path) -> list[Told]:
    """The promises of earlier parts; none if there is no file."""
    if not path.exists():
        return []
    return [(row[0], row[1], row[2]) for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())]


def add_promises(path: Path, promises: Sequence[Told]) -> None:
    """Appends a part, one promise a line."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(each)}\n" for each in promises)


def served_name(args: argparse.Namespace) -> str:
    """The name under which the server answers."""
    return EMBEDDED_NAME if args.model is None else REAL_NAME


def serving_words(args: argparse.Namespace) -> list[str]:
    """The options of ``farsight serve`` that choose the model and its device."""
    if args.model is None:
        return ["--device", "emulated:a100-7b"]
    dtype = [] if args.dtype is None else ["--dtype", args.dtype]
    return ["--model", str(args.model), "--served-model-name", served_name(args), *dtype]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promises", description="Coverage of live promises.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.9, help="share of the measured capacity (default: 0.9)")
    parser.add_argument("--preset", default="fcfs")
    parser.add_argument("--capacity-s", type=float, default=20.0, help="seconds of measuring the capacity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a real checkpoint (default: an emulated A100)")
    parser.add_argument("--dtype", help="of the weights; float32 where processors lack bfloat16")
    parser.add_argument("--results", type=Path, help="file to which this part's promises are added")
    args = parser.parse_args()
    earlier = [] if args.results is None else read_promises(args.results)
    folder, port = Path(tempfile.mkdtemp(prefix="farsight-promises-")), free_port()
    (folder / "config.toml").write_text(f"[server]\nmax_wait_s = 0.0\n[engine]\nmax_num_seqs = {PLACES}\n")
    words = ["-m", "farsight.services.cli", "serve", *serving_words(args), "--preset", args.preset, "--benchmark-mode"]
    words += ["--port", str(port), "--config", str(folder / "config.toml"), "--max-model-len", "2048"]
    server = RunningServer(ServerCommand([sys.executable, *words], port, served_name(args)), folder / "server.log")
    try:
        server.wait_until_ready(READY_S)
        promises, load = asyncio.run(measure(server.command.base_url, args, args.seed + len(earlier)))
    finally:
        server.stop()
    print(f"{load}; {shares(promises)}")
    if args.results is not None:
        add_promises(args.results, promises)
        print(f"all parts: {shares([*earlier, *promises])}")


if __name__ == "__main__":
    main()
