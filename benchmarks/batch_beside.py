"""What a batch takes from the requests beside it, and how much it uses of what they leave.

``python -m benchmarks.batch_beside``: an emulated A100 with a 7B model, requests by a Poisson process at ``--load`` of
the capacity that this command measures first, by turns without and with a batch whose lines never run out. Prints the
99th percentile of the times to first token of both, and the output tokens of the batch over those that the device had
left: its tokens with all places taken by lines, less those of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.common.servers import RunningServer, ServerCommand, free_port
from services.launch.launch import EMBEDDED_NAME

READY_S = 180.0
SETTLE_S = 3.0
MEDIAN_LEN, SIGMA, MAX_LEN = 60, 0.8, 512


@dataclass(slots=True)
class Phase:
    """What was seen of the requests in one phase.

    Attributes:
        ttft_s: Seconds to the first token of each.
        num_tokens: Output tokens of all of them.
        seconds: Length of the phase.
    """

    ttft_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0


class Clients:
    """Requests of clients, and batches."""

    def __init__(self, url: str, seed: int, places: int) -> None:
        self._draw = random.Random(seed)
        self._places = places
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(600)
        self._session = aiohttp.ClientSession(url, connector=connector, timeout=timeout)

    async def close(self) -> None:
        await self._session.close()

    def _body(self) -> dict[str, object]:
        prompt = " ".join(f"w{self._draw.randrange(10**6)}" for _ in range(self._draw.randrange(2, 40)))
        length = max(1, min(MAX_LEN, round(self._draw.lognormvariate(float(np.log(MEDIAN_LEN)), SIGMA))))
        return {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": MAX_LEN, "benchmark_len": length}

    async def one(self, phase: Phase) -> None:
        body = self._body()
        began = time.perf_counter()
        async with self._session.post("/v1/completions", json=body | {"stream": True}) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(b"data:"):
                    phase.ttft_s.append(time.perf_counter() - began)
                    break
            await reply.read()
        phase.num_tokens += int(str(body["benchmark_len"]))

    async def capacity(self, seconds: float) -> float:
        """Requests a second with all places taken."""
        end, phase, num = time.perf_counter() + seconds, Phase(), 0

        async def client() -> None:
            nonlocal num
            while time.perf_counter() < end:
                await self.one(phase)
                num += 1

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(2 * self._places)))
        return num / (time.perf_counter() - began)

    async def load(self, rate: float, seconds: float) -> Phase:
        phase, began = Phase(), time.perf_counter()
        tasks, due = [], began
        while (due := due + self._draw.expovariate(rate)) < began + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.one(phase)))
        await asyncio.gather(*tasks)
        phase.seconds = time.perf_counter() - began
        return phase

    async def begin_batch(self, num_lines: int) -> str:
        lines = (
            {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": self._body()}
            for index in range(num_lines)
        )
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(json.dumps(line) for line in lines).encode(), filename="lines.jsonl")
        async with self._session.post("/v1/files", data=form) as reply:
            reply.raise_for_status()
            file_id = (await reply.json())["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        async with self._session.post("/v1/batches", json=body) as reply:
            reply.raise_for_status()
            return str((await reply.json())["id"])

    async def end_batch(self, batch_id: str) -> None:
        async with self._session.post(f"/v1/batches/{batch_id}/cancel") as reply:
            reply.raise_for_status()
        while True:
            async with self._session.get(f"/v1/batches/{batch_id}") as reply:
                if (await reply.json())["status"] == "cancelled":
                    return
            await asyncio.sleep(0.2)

    async def num_generated(self) -> float:
        """Output tokens of the service so far."""
        async with self._session.get("/metrics") as reply:
            page = await reply.text()
        name = "vllm:generation_tokens_total{"
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


async def measure(url: str, args: argparse.Namespace) -> dict[str, float]:
    clients = Clients(url, args.seed, args.places)
    try:
        rate = args.load * await clients.capacity(args.capacity_s)
        full = await clients.begin_batch(args.lines)
        await asyncio.sleep(SETTLE_S)
        all_tokens_s = await _tokens_a_second(clients, args.capacity_s)
        await clients.end_batch(full)
        ttft_s: dict[str, list[float]] = {"without": [], "with": []}
        used = []
        for _ in range(args.turns):
            ttft_s["without"] += (await clients.load(rate, args.seconds)).ttft_s
            batch = await clients.begin_batch(args.lines)
            await asyncio.sleep(SETTLE_S)
            before = await clients.num_generated()
            phase = await clients.load(rate, args.seconds)
            generated = await clients.num_generated() - before
            await clients.end_batch(batch)
            ttft_s["with"] += phase.ttft_s
            own_s = phase.num_tokens / phase.seconds
            used.append((generated / phase.seconds - own_s) / (all_tokens_s - own_s))
    finally:
        await clients.close()
    p99 = {name: float(np.quantile(values, 0.99)) for name, values in ttft_s.items()}
    p50 = {name: float(np.quantile(values, 0.5)) for name, values in ttft_s.items()}
    return {
        "requests_s": rate,
        "num_requests": len(ttft_s["with"]),
        "ttft_p99_without_s": p99["without"],
        "ttft_p99_with_s": p99["with"],
        "ttft_p99_ratio": p99["with"] / p99["without"],
        "ttft_p50_ratio": p50["with"] / p50["without"],
        "idle_used": float(np.mean(used)),
    }


async def _tokens_a_second(clients: Clients, seconds: float) -> float:
    before, began = await clients.num_generated(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (await clients.num_generated() - before) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_beside", description="A batch beside requests.")
    parser.add_argument("--load", type=float, default=0.5, help="share of the measured capacity (default: 0.5)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase (default: 60)")
    parser.add_argument("--turns", type=int, default=2, help="phases of each kind (default: 2)")
    parser.add_argument("--places", type=int, default=16, help="of the device (default: 16)")
    parser.add_argument("--lines", type=int, default=20_000, help="of each batch (default: 20000)")
    parser.add_argument("--preset", default="fcfs")
    parser.add_argument("--capacity-s", type=float, default=20.0, help="seconds of measuring the capacity")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder, port = Path(tempfile.mkdtemp(prefix="farsight-batch-beside-")), free_port()
    (folder / "config.toml").write_text(f"[server]\nmax_wait_s = 0.0\n[engine]\nmax_num_seqs = {args.places}\n")
    words = ["-m", "services.cli", "serve", "--device", "emulated:a100-7b", "--preset", args.preset, "--benchmark-mode"]
    words += ["--port", str(port), "--config", str(folder / "config.toml"), "--max-model-len", "2048"]
    server = RunningServer(ServerCommand([sys.executable, *words], port, EMBEDDED_NAME), folder / "server.log")
    try:
        server.wait_until_ready(READY_S)
        print(json.dumps(asyncio.run(measure(server.command.base_url, args)), indent=2))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
