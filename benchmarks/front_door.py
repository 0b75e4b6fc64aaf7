"""Large hostile bodies at once beside one stream, on an emulated device: ``python -m benchmarks.front_door``.

For each shape of body, prints how ``/health`` and a bystander's stream fared while six bodies of 4 MB were sent at
once, and how they were answered. Exits with 1 if the 99th percentile of ``/health`` or the largest gap of the stream
exceeds its limit, or an answer is no error of the OpenAI API.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.burst import PROFILE, Connection, judge
from benchmarks.common.servers import RunningServer, emulated_device, farsight_command
from farsight.services.bench.report import provenance, write_json
from farsight.services.launch.launch import EMBEDDED_NAME

PROGRAM = ("python", "-m", "benchmarks.front_door")
NUM_BYTES = 4 * 1024 * 1024 - 1024
STREAM_TOKENS = 800
PROBE_S = 0.01


def _fields(prompt: str) -> bytes:
    return b'{"model": "%s", "max_tokens": 1, "prompt": %s}' % (EMBEDDED_NAME.encode(), prompt.encode())


def _filled(unit: str) -> str:
    return unit * (NUM_BYTES // len(unit.encode()) - 20)


SHAPES: dict[str, Callable[[], bytes]] = {
    "words": lambda: _fields(json.dumps(_filled("the quick brown fox "))),
    "one word": lambda: _fields(json.dumps(_filled("a"))),
    "256 texts": lambda: _fields(json.dumps([_filled("word ")[: NUM_BYTES // 256 - 10]] * 256)),
    "token ids": lambda: _fields(f"[{_filled('5,')}5]"),
    "empty lists": lambda: _fields(f"[{_filled('[],')}[]]"),
    "empty objects": lambda: _fields(f"[{_filled('{},')}{{}}]"),
    "unknown fields": lambda: b"{" + b",".join(b'"%d":0' % number for number in range(NUM_BYTES // 11)) + b"}",
    "not JSON": lambda: b"[" * NUM_BYTES,
}


def _request(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Bystander:
    """Reads one stream and looks at ``/health`` in threads of this process, which does nothing else meanwhile."""

    def __init__(self, port: int) -> None:
        self.gaps: list[float] = []
        self.health: list[float] = []
        self._base = f"http://127.0.0.1:{port}"
        self._over = threading.Event()
        self._begun = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._look)]

    def __enter__(self) -> Bystander:
        for thread in self._threads:
            thread.start()
        if not self._begun.wait(60):
            raise RuntimeError("the bystander's stream has not begun")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        fields = {"model": EMBEDDED_NAME, "prompt": "a", "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        while not self._over.is_set():
            body = json.dumps({**fields, "stream": True}).encode()
            request = urllib.request.Request(f"{self._base}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as reply:
                last = None
                for line in reply:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now
                    self._begun.set()
                    if self._over.is_set():
                        return

    def _look(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter()
            with urllib.request.urlopen(f"{self._base}/health", timeout=60) as reply:
                reply.read()
            self.health.append(time.perf_counter() - began)
            time.sleep(PROBE_S)


async def _send(port: int, body: bytes, count: int) -> collections.Counter[str]:
    loop = asyncio.get_running_loop()

    async def ask() -> tuple[str, bool]:
        _, connection = await loop.create_connection(lambda: Connection(_request(body)), "127.0.0.1", port)
        return judge(await connection.reply, stream=False)

    found = await asyncio.gather(*(ask() for _ in range(count)))
    return collections.Counter(outcome if right else f"WRONG {outcome}" for outcome, right in found)


def measure(port: int, shape: str, count: int) -> dict[str, Any]:
    """One shape of body, ``count`` at once."""
    body = SHAPES[shape]()
    with Bystander(port) as bystander:
        time.sleep(1.0)
        bystander.gaps.clear()
        bystander.health.clear()
        began = time.perf_counter()
        outcomes = asyncio.run(_send(port, body, count))
        took_s = time.perf_counter() - began
        time.sleep(1.0)
    health = sorted(bystander.health)
    return {
        "shape": shape,
        "bytes": len(body),
        "took_s": took_s,
        "outcomes": dict(outcomes),
        "health_p99_s": health[int(0.99 * (len(health) - 1))],
        "health_max_s": health[-1],
        "largest_gap_s": max(bystander.gaps),
    }


def main() -> int:
    args = _parse()
    folder = Path(tempfile.mkdtemp(prefix="farsight-front-door-"))
    command = farsight_command(None, [*emulated_device(folder, PROFILE), *args.serve_options])
    server = RunningServer(command, folder / "server.log")
    print(f"server log: {folder / 'server.log'}", file=sys.stderr)
    runs, failed = [], False
    try:
        server.wait_until_ready(args.ready_timeout)
        asyncio.run(_send(server.command.port, SHAPES["words"](), 2))
        for shape in args.shape or SHAPES:
            run = measure(server.command.port, shape, args.count)
            over = run["health_p99_s"] > args.max_health or run["largest_gap_s"] > args.max_gap
            wrong = any(outcome.startswith("WRONG") or outcome.startswith("500") for outcome in run["outcomes"])
            failed = failed or over or wrong
            runs.append(run)
            print(
                f"{'FAILED' if over or wrong else 'ok'}: {args.count} x {run['bytes'] / 1e6:.1f} MB of {shape}: "
                f"{run['took_s']:.2f} s, {run['outcomes']}; /health p99 {1e3 * run['health_p99_s']:.0f} ms, max "
                f"{1e3 * run['health_max_s']:.0f} ms; largest gap of a stream {1e3 * run['largest_gap_s']:.0f} ms",
                flush=True,
            )
    finally:
        end = server.stop()
    write_json(args.json, {**provenance(PROGRAM), "runs": runs, "end": end})
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6, help="bodies at once")
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="only this one; may be repeated")
    parser.add_argument("--max-health", type=float, default=0.1, help="limit of the 99th percentile, seconds")
    parser.add_argument("--max-gap", type=float, default=0.3, help="limit of the stream's largest gap, seconds")
    parser.add_argument("--ready-timeout", type=float, default=180.0, help="seconds")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("serve_options", nargs="*", help="after --: more arguments of farsight serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
