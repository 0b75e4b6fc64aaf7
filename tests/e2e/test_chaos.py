"""Resumable streams while one process after the other is killed: complete, in order, and token for token the same.

``make test`` kills each kind once that a server cannot be without, ``make test-nightly`` all kinds for ``CHAOS_S``
seconds. What cannot be survived is not killed: the process of ``farsight serve``, GCS and the raylet of its head node.
The long run has a second node with a replica of its own, whose raylet is one of the kinds.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.common.resumable import Client, clients
from benchmarks.common.streams import open_streams, stream_body
from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.batch.batch_runs import command_of
from tests.e2e.second_node import SecondNode
from tests.e2e.server import LONG_S, Server, farsight, start_server, wait_until

NUM_STREAMS = 64
NUM_TOKENS = 400
PAUSE_S = 5.0
"""From a recovery to the next kill."""

CHAOS_S = float(os.environ.get("CHAOS_S", "300"))
EXAMPLES = Path(__file__).parents[2] / "examples"

COMPONENTS = ("router", "worker-0", "length-predictor-0")
"""One of each process of the placement ``fused``; the Router's also has the Scheduler, the Supervisor and the logs."""

PROGRAMS = {"haproxy": "haproxy", "controller": "ServeController"}
"""Words in the command lines of processes that are no components."""

HTTP_SIDE = ("haproxy", "ingress")

RAYLET = "second raylet"
"""That of the second node, with the replica that lives there."""

AWAY = "worker-1"

pytestmark = pytest.mark.timeout(3600 + CHAOS_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("chaos")
    config = folder / "config.toml"
    config.write_text("[server]\ningress_replicas = 1\n")
    flags = ("--config", str(config), "--dtype", "float32", "--placement", "fused", "--proxy", "haproxy")
    running = start_server(folder / "server.log", *flags)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[object]:
    """What ordinary clients get when nothing dies."""

    async def run() -> list[object]:
        async with open_streams(server.base_url, NUM_STREAMS, NUM_TOKENS) as streams:
            return [stream.outcome for stream in await streams.finish()]

    return asyncio.run(run())


def pids_of(server: Server, kind: str) -> set[int]:
    """The processes of that kind: components by their rows, others by their command lines."""
    if kind in PROGRAMS:
        return {each.pid for each in server.children() if any(PROGRAMS[kind] in word for word in command_of(each)[:1])}
    rows = server.get("/status")["actors"]
    wanted = [row for row in rows if (row["kind"] if kind == "ingress" else row["name"]).lower() == kind]
    return {row["pid"] for row in wanted if row["state"] == "ready" and psutil.pid_exists(row["pid"])}


def is_well(server: Server) -> bool:
    """Whether every component is ready and requests are answered."""
    try:
        rows = server.get("/status", timeout_s=10)["actors"]
        ingresses = [row for row in rows if row["kind"] == "Ingress"]
        return server.answers() and bool(ingresses) and all(row["state"] == "ready" for row in rows)
    except OSError:
        return False


@dataclass
class Kill:
    kind: str
    at: float
    recovered_at: float = 0.0
    next_at: float = 0.0


@dataclass
class Chaos:
    """Kills one process after the other.

    Attributes:
        node: Where there is a second node, worker 1 lives there between two kills.
    """

    server: Server
    node: SecondNode | None = None
    kills: list[Kill] = field(default_factory=list)

    def strike_raylet(self) -> None:
        """Kills the raylet of the second node; returns when its replica lives elsewhere and all is well."""
        assert self.node is not None
        worker = self.server.pid_of(AWAY)
        assert self.node.holds(worker), "the second replica is not on the second node"
        kill = Kill(RAYLET, time.monotonic())
        os.kill(self.node.pid, signal.SIGKILL)
        wait_until(lambda: self._replaced(AWAY, {worker}), f"no successor of {AWAY}")
        kill.recovered_at = time.monotonic()
        self.kills.append(kill)

    def move_away(self) -> None:
        """Adds a second node; replica 1 begins again there."""
        assert self.node is not None
        self.node.start()
        for count in ("1", "2"):
            command = farsight("scale", "replica", count, "--port", str(self.server.port))
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
            assert done.returncode == 0, done.stderr
        wait_until(lambda: is_well(self.server), "the service is not well with two nodes")
        assert self.node.holds(self.server.pid_of(AWAY)), "the second replica is not on the second node"

    def strike(self, kind: str) -> None:
        """Kills one; returns when its successor is there and all is well."""
        wait_until(lambda: is_well(self.server) and pids_of(self.server, kind), f"there is no {kind}")
        victims = pids_of(self.server, kind)
        kill = Kill(kind, time.monotonic())
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self._replaced(kind, victims), f"no successor of {kind}")
        kill.recovered_at = time.monotonic()
        self.kills.append(kill)

    def _replaced(self, kind: str, victims: set[int]) -> bool:
        try:
            return is_well(self.server) and bool(pids_of(self.server, kind) - victims)
        except OSError:
            return False


def check_complete(found: list[Client], undisturbed: list[object]) -> None:
    for client in found:
        assert client.failures == []
        for stream in client.done:
            assert stream.outcome == undisturbed[client.index], f"stream {client.index} is not what it should be"


async def strike(
    server: Server, undisturbed: list[object], kinds: Iterator[str], seconds: float, node: SecondNode | None = None
) -> list[str]:
    """Kills in turn under load; returns lines of the table."""
    chaos = Chaos(server, node)
    async with clients(server.base_url, NUM_STREAMS, NUM_TOKENS) as found:
        began = time.monotonic()
        while time.monotonic() - began < seconds and (kind := next(kinds, None)) is not None:
            await asyncio.to_thread(chaos.strike_raylet if kind == RAYLET else functools.partial(chaos.strike, kind))
            await asyncio.sleep(PAUSE_S)
            chaos.kills[-1].next_at = time.monotonic()
            if {kill.kind for kill in chaos.kills} <= set(COMPONENTS):
                assert not any(client.num_resumed for client in found), "a death behind the ingress broke a connection"
            if kind == RAYLET:
                await asyncio.to_thread(chaos.move_away)
    check_complete(found, undisturbed)
    assert sum(len(client.done) for client in found) >= NUM_STREAMS
    statuses: dict[int, int] = {}
    for client in found:
        for status, number in client.statuses.items():
            statuses[status] = statuses.get(status, 0) + number
    assert set(statuses) <= {200, 429, 502, 503}, statuses
    return table(chaos.kills, found, statuses)


def table(kills: list[Kill], found: list[Client], statuses: dict[int, int]) -> list[str]:
    lines = [f"{'killed':20} {'kills':>6} {'recovered after':>16} {'longest pause of a stream':>26}"]
    for kind in sorted({kill.kind for kill in kills}):
        own = [kill for kill in kills if kill.kind == kind]
        pause_s = max(client.longest_pause_s(kill.at, kill.next_at) for kill in own for client in found)
        recovered_s = max(kill.recovered_at - kill.at for kill in own)
        lines.append(f"{kind:20} {len(own):6} {recovered_s:14.1f} s {pause_s:24.1f} s")
    num_done, num_resumed = sum(len(client.done) for client in found), sum(client.num_resumed for client in found)
    return [*lines, f"{num_done} complete streams, {num_resumed} times resumed; replies by status: {statuses}"]


def show(request: pytest.FixtureRequest, lines: list[str]) -> None:
    """On the terminal, if there is one: processes of pytest-xdist have none."""
    plugins = request.config.pluginmanager
    reporter = plugins.getplugin("terminalreporter")
    if reporter is not None:
        with plugins.getplugin("capturemanager").global_and_fixture_disabled():
            for line in ("", *lines):
                reporter.write_line(line)


def test_every_stream_survives_the_death_of_what_none_can_do_without(
    server: Server, undisturbed: list[object], request: pytest.FixtureRequest
) -> None:
    kinds = iter(["worker-0", "router", "ingress"])
    show(request, asyncio.run(strike(server, undisturbed, kinds, LONG_S)))


def test_every_stream_survives_any_death_for_long(
    server: Server, undisturbed: list[object], request: pytest.FixtureRequest
) -> None:
    every = [RAYLET, *PROGRAMS, *COMPONENTS, AWAY, "ingress"]
    rng = random.Random(7)
    kinds = itertools.chain(every, iter(lambda: rng.choice(every), None))
    node = SecondNode(server)
    Chaos(server, node).move_away()
    show(request, asyncio.run(strike(server, undisturbed, kinds, CHAOS_S, node)))


def run_example(name: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(EXAMPLES / name), *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", ["resuming.py", "resuming_openai.py"])
def test_the_examples_read_on(server: Server, name: str) -> None:
    """Killed while the first characters have come: the whole text is the same."""
    if name == "resuming.py":
        body = {**stream_body(1, 600), "stream_options": None}
        arguments: tuple[str, ...] = (f"{server.base_url}/v1/completions", json.dumps(body))
    else:
        arguments = (f"{server.base_url}/v1", EMBEDDED_NAME, "Write in upper case: hello world", "40")
    expected, _ = run_example(name, *arguments).communicate(timeout=LONG_S)
    assert expected
    chaos = Chaos(server)
    with run_example(name, *arguments) as example:
        assert example.stdout is not None
        began = example.stdout.read(1)
        for kind in HTTP_SIDE:
            chaos.strike(kind)
        rest = example.stdout.read()  # `communicate` would leave out what lies in the buffer behind the first character
    assert (example.returncode, began + rest) == (0, expected)


ANSWER = {
    **stream_body(1, 300),
    "n": 2,
    "logprobs": 2,
    "echo": True,
    "prompt": "Write in upper case: hello world",
    "stream_options": {"include_usage": True},
}


def read_choices(chunks: Iterable[dict[str, Any]]) -> tuple[list[Any], Any]:
    """Text, log probabilities and finish reason of each choice, and the tokens of the usage."""
    choices: list[tuple[Any, ...]] = [("", [], [], [], []) for _ in range(2)]
    usage = None
    for chunk in chunks:
        if chunk["usage"]:
            usage = {name: chunk["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        for choice in chunk["choices"]:
            text, *lists = choices[choice["index"]]
            for known, name in zip(lists, ("tokens", "token_logprobs", "text_offset"), strict=False):
                known += (choice["logprobs"] or {}).get(name, [])
            lists[3] += [choice["finish_reason"]] if choice["finish_reason"] else []
            choices[choice["index"]] = (text + choice["text"], *lists)
    return choices, usage


def chunks_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def test_log_probabilities_and_usage_survive_as_well(server: Server) -> None:
    """Another replica goes on with both choices, behind the echoed prompt."""
    url, headers = f"{server.base_url}/v1/completions", {"X-Farsight-Resumable": "true"}
    with httpx.Client(timeout=LONG_S) as client:
        with client.stream("POST", url, json=ANSWER) as response:
            expected = read_choices(chunks_of(response))
        seen: list[dict[str, Any]] = []
        with client.stream("POST", url, json=ANSWER, headers=headers) as response:
            stream_id = response.headers["X-Farsight-Stream"]
            lines = response.iter_lines()
            while len(seen) < 6:
                line = next(lines)
                if line.startswith("id: "):
                    last_id = line.removeprefix("id: ")
                elif line:
                    seen.append(json.loads(line.removeprefix("data: ")))
        Chaos(server).strike("ingress")
        address = f"{server.base_url}/v1/streams/{stream_id}"
        with client.stream("GET", address, headers={"Last-Event-ID": last_id}) as response:
            assert response.status_code == 200
            assert read_choices([*seen, *chunks_of(response)]) == expected
