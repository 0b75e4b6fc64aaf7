"""Many requests at once beside a few in flight, from a server on an emulated device: ``python -m benchmarks.burst``.

Prints the answers of each run, how long ``/health`` and ``/status`` took meanwhile, and the CPU time of the server
for each request, whole and by process; then the ratio of each burst's to that of the run with a few in flight. Exits
with 1 if an answer does not have the shape of the OpenAI API, or a given limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import multiprocessing
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.servers import RunningServer, emulated_device, farsight_command
from farsight.services.bench.report import provenance, write_json
from farsight.services.launch.launch import EMBEDDED_NAME

PROGRAM = ("python", "-m", "benchmarks.burst")
PROFILE = {
    "base_s": 0.004,
    "prefill_token_s": 0.0,
    "decode_seq_s": 0.0,
    "context_token_s": 0.0,
    "kv_bytes": 1024,
    "copy_bandwidth": 1e8,
}
"""Profile of a device that is fast enough for the measurement to show the HTTP side."""

PROBE_TIMEOUT_S = 30.0
PROBE_PAUSE_S = 0.05
SETTLE_S = 3.0
"""Seconds of rest before and after a run, so that its late work is counted with it."""

PROBED = ("/health", "/status")


@dataclass
class Answers:
    """The answers of a run: how often each outcome came, and an example of each wrong one."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: dict[str, str] = field(default_factory=dict)

    def add(self, reply: bytes, *, stream: bool) -> None:
        outcome, right = judge(reply, stream=stream)
        self.outcomes[outcome] += 1
        if not right:
            self.wrong.setdefault(outcome, repr(reply[-200:]))


def judge(reply: bytes, *, stream: bool) -> tuple[str, bool]:
    """The outcome in a few words, and whether it is a whole answer or an error as the OpenAI API has them.

    Args:
        reply: All that came over one connection.
    """
    head, _, body = reply.partition(b"\r\n\r\n")
    if not head:
        return "no reply", False
    status = int(head.split(b" ", 2)[1])
    if b"transfer-encoding: chunked" in head.lower():
        body = _dechunked(body)
    if status == 200 and stream:
        return "200", body.endswith(b"data: [DONE]\n\n")
    try:
        value = json.loads(body)
    except ValueError:
        return f"{status}, not JSON", False
    if status == 200:
        return "200", "choices" in value
    error = value.get("error", {})
    return f"{status} {error.get('code')}", {"message", "type", "param", "code"} <= set(error)


def _dechunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


class Connection(asyncio.Protocol):
    """One request on a connection of its own, as clients that do not know each other come."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parts: list[bytes] = []
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.reply.done():
            self.reply.set_result(b"".join(self._parts))


async def load(port: int, count: int, in_flight: int, *, stream: bool, max_tokens: int, words: int) -> Answers:
    """Sends ``count`` requests, so many at once, each with a prompt of its own."""
    answers = Answers()
    free = asyncio.Semaphore(in_flight)
    loop = asyncio.get_running_loop()

    async def ask(index: int) -> None:
        async with free:
            request = _request(index, stream=stream, max_tokens=max_tokens, words=words)
            try:
                _, connection = await loop.create_connection(lambda: Connection(request), "127.0.0.1", port)
            except OSError as error:
                answers.add(b"", stream=stream)
                answers.wrong.setdefault("no reply", repr(error))
                return
            answers.add(await connection.reply, stream=stream)

    await asyncio.gather(*(ask(index) for index in range(count)))
    return answers


def _request(index: int, *, stream: bool, max_tokens: int, words: int) -> bytes:
    prompt = " ".join(f"word{index}x{number}" for number in range(words))
    fields = {"model": EMBEDDED_NAME, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    body = json.dumps({**fields, "messages": [{"role": "user", "content": prompt}]}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def probe(port: int, path: str, latencies: Any, stop: Any) -> None:
    """Requests the page again and again in a process of its own, and records durations and statuses."""
    while not stop.is_set():
        began = time.perf_counter()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PROBE_TIMEOUT_S) as reply:
                reply.read()
                outcome = str(reply.status)
        except urllib.error.HTTPError as error:
            outcome = str(error.code)
        except OSError as error:
            outcome = repr(error)
        latencies.put((time.perf_counter() - began, outcome))
        time.sleep(PROBE_PAUSE_S)
    latencies.put(None)


class Probes:
    """Watches how long ``PROBED`` take while something else goes on."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._found = {path: context.Queue() for path in PROBED}
        self._processes = [
            context.Process(target=probe, args=(port, path, queue, self._stop), daemon=True)
            for path, queue in self._found.items()
        ]
        for process in self._processes:
            process.start()
        self._before = {path: queue.get() for path, queue in self._found.items()}  # so they run

    def end(self) -> dict[str, dict[str, Any]]:
        """The slowest and the median answer in seconds, and how often each status came."""
        self._stop.set()
        shown = {}
        for path, queue in self._found.items():
            found = sorted(iter(queue.get, None))
            took = [seconds for seconds, _ in found]
            statuses = collections.Counter(outcome for _, outcome in found)
            shown[path] = {"max_s": took[-1], "p50_s": took[len(took) // 2], "statuses": dict(statuses)}
        for process in self._processes:
            process.join()
        return shown


def cpu_by_process(server: RunningServer) -> dict[str, float]:
    """CPU seconds by pid and title."""
    used = {}
    for process in server.tree.processes():
        try:
            title = " ".join(process.cmdline()[:3])[-60:] or process.name()
            used[f"{process.pid} {title}"] = sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return used


def measure(
    server: RunningServer, args: argparse.Namespace, count: int, in_flight: int, *, stream: bool
) -> dict[str, Any]:
    """One run."""
    port = server.command.port
    probes = Probes(port)
    time.sleep(SETTLE_S)
    before, began = cpu_by_process(server), time.perf_counter()
    answers = asyncio.run(load(port, count, in_flight, stream=stream, max_tokens=args.max_tokens, words=args.words))
    took_s = time.perf_counter() - began
    time.sleep(SETTLE_S)
    after = cpu_by_process(server)
    used = {name: cpu_s - before.get(name, 0.0) for name, cpu_s in after.items()}
    return {
        "in_flight": in_flight,
        "stream": stream,
        "requests": count,
        "took_s": took_s,
        "outcomes": dict(answers.outcomes),
        "wrong": answers.wrong,
        "cpu_ms_per_request": 1000 * sum(used.values()) / count,
        "cpu_ms_by_process": {
            name: 1000 * cpu_s / count for name, cpu_s in sorted(used.items(), key=lambda item: -item[1])[:6]
        },
        "pages": probes.end(),
    }


def describe(run: dict[str, Any]) -> str:
    kind = "streaming" if run["stream"] else "blocking"
    lines = [
        f"{run['requests']} {kind}, {run['in_flight']} in flight: {run['took_s']:.1f} s, {run['outcomes']}, "
        f"{run['cpu_ms_per_request']:.2f} CPU ms per request"
    ]
    lines += [f"    {cpu_ms:6.2f} ms  {name}" for name, cpu_ms in run["cpu_ms_by_process"].items()]
    lines += [
        f"    {path}: p50 {page['p50_s']:.3f} s, max {page['max_s']:.3f} s, {page['statuses']}"
        for path, page in run["pages"].items()
    ]
    lines += [f"    WRONG {outcome}: {example}" for outcome, example in run["wrong"].items()]
    return "\n".join(lines)


def main() -> int:
    args = _parse()
    folder = Path(tempfile.mkdtemp(prefix="farsight-burst-"))
    command = farsight_command(None, [*emulated_device(folder, PROFILE), *args.serve_options])
    server = RunningServer(command, folder / "server.log")
    print(f"server log: {folder / 'server.log'}", file=sys.stderr)
    runs: list[dict[str, Any]] = []
    try:
        server.wait_until_ready(args.ready_timeout)
        asyncio.run(load(server.command.port, 200, 64, stream=False, max_tokens=args.max_tokens, words=args.words))
        for stream in {"both": (False, True), "blocking": (False,), "streaming": (True,)}[args.kind]:
            for count, in_flight in [(args.few_requests, args.few), *((each, each) for each in args.at_once)]:
                runs.append(measure(server, args, count, in_flight, stream=stream))
                print(describe(runs[-1]), flush=True)
    finally:
        end = server.stop()
    verdicts = judge_runs(runs, args)
    print("\n".join(verdicts))
    write_json(args.json, {**provenance(PROGRAM), "runs": runs, "end": end})
    return 1 if any(verdict.startswith("FAILED") for verdict in verdicts) else 0


def judge_runs(runs: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """A line for each burst and each limit."""
    lines = [f"FAILED: answers of no known shape: {run['wrong']}" for run in runs if run["wrong"]]
    few = {run["stream"]: run["cpu_ms_per_request"] for run in runs if run["in_flight"] == args.few}
    for run in runs:
        if run["in_flight"] == args.few:
            continue
        ratio = run["cpu_ms_per_request"] / few[run["stream"]]
        found = {"CPU ratio": (ratio, args.max_ratio)}
        found |= {
            f"{path} s": (run["pages"][path]["max_s"], limit)
            for path, limit in zip(PROBED, (args.max_health, args.max_status), strict=True)
        }
        name = f"{run['requests']} {'streaming' if run['stream'] else 'blocking'}"
        for what, (value, limit) in found.items():
            verdict = "FAILED" if value > limit else "ok"
            lines.append(f"{verdict}: {name} at once: {what} {value:.2f}, at most {limit:g}")
    return lines


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=64, help="in flight in the run to compare with")
    parser.add_argument("--few-requests", type=int, default=2000, help="requests of that run")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1500, 4000, 5000])
    parser.add_argument("--kind", choices=("both", "blocking", "streaming"), default="both")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--words", type=int, default=20, help="words of each prompt")
    parser.add_argument("--max-ratio", type=float, default=1.2, help="of CPU per request, burst to few")
    parser.add_argument("--max-health", type=float, default=1.0, help="seconds")
    parser.add_argument("--max-status", type=float, default=10.0, help="seconds")
    parser.add_argument("--ready-timeout", type=float, default=180.0, help="seconds")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("serve_options", nargs="*", help="after --: more arguments of farsight serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
