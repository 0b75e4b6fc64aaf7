"""Inputs for ``farsight batch`` on the embedded model, and runs of the real command that a test can watch and kill."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from farsight.services.batch.progress import partial_path
from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import farsight, wait_until

TIMEOUT_S = 500.0
"""For anything at all: a busy machine must not fail a test."""

REFUSED_EVERY = 25
_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "big", "red", "dog", "run", "to", "tree", "friend")


def write_requests(path: Path, num_lines: int) -> Path:
    """Chat and completions in turn, greedy; each 25th line asks for what is not supported."""
    rng = random.Random(11)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_lines):
            file.write(json.dumps(_line(number, " ".join(rng.choices(_WORDS, k=rng.randint(3, 10))))) + "\n")
    return path


def expected_status(number: int) -> int:
    return 400 if number % REFUSED_EVERY == REFUSED_EVERY - 1 else 200


def _line(number: int, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": EMBEDDED_NAME, "temperature": 0, "max_tokens": 24 + number % 17}
    body["ignore_eos"] = True  # the embedded model would end most answers after three tokens
    if number % 2:
        url = "/v1/completions"
        body["prompt"] = text
    else:
        url = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": text}]
    if expected_status(number) != 200:
        body["n"] = 999
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def check_output(target: Path, num_lines: int) -> list[Any]:
    """Every line once and in order, with the status it must have; returns what the model wrote."""
    lines = read_lines(target)
    assert [line["custom_id"] for line in lines] == [f"line-{number}" for number in range(num_lines)]
    statuses = [line["response"]["status_code"] for line in lines]
    assert statuses == [expected_status(number) for number in range(num_lines)]
    return [_written(line["response"]["body"]) for line in lines]


def _written(body: dict[str, Any]) -> Any:
    """Without what differs from run to run: ids, times, and what a request that is computed again after a kill finds in
    the prefix cache, where its first computation left it."""
    if "choices" not in body:
        return body["error"]
    usage = body["usage"]
    return body["choices"], [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]


@dataclass
class BatchRun:
    """One run of the command, in a process group of its own."""

    process: subprocess.Popen[bytes]
    target: Path
    log: Path

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def num_done(self) -> int:
        """Lines in the progress file, its header left out."""
        try:
            return max(0, partial_path(self.target).read_bytes().count(b"\n") - 1)
        except FileNotFoundError:
            return 0

    def wait_done(self, num_lines: int) -> None:
        """Until so many lines are kept."""
        self.wait_for(lambda: self.num_done() >= num_lines)

    def wait_for(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert self.process.poll() is None, f"the run ended too early: {self.said()}"
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def family(self) -> list[psutil.Process]:
        """Every process that the command started, directly or not."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def has_driver(self) -> bool:
        """Whether the job has said its first word; looking for its process again and again would be a load."""
        return "the model is starting" in self.said()

    def driver(self) -> psutil.Process:
        return driver_among(self.family())

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)


def start_batch(source: Path, target: Path, *flags: str, env: Mapping[str, str] | None = None) -> BatchRun:
    """In float32: only so does the text not depend on what else is in a step."""
    config = source.with_name("float32.toml")
    config.write_text('[model]\ndtype = "float32"\n', encoding="utf-8")
    log = target.with_name(f"{target.name}.log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            farsight("batch", str(source), str(target), "--config", str(config), *flags),
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    return BatchRun(process, target, log)


def driver_among(processes: list[psutil.Process]) -> psutil.Process:
    """The process of a batch job: the oldest, since whatever it forks is called like it for a moment."""
    drivers = [each for each in processes if "farsight.services.batch.job" in command_of(each)[:4]]
    return min(drivers, key=lambda each: each.create_time())


def hosts_among(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Farsight's actors."""
    return [each for each in processes if _is_called(each, "ray::ComponentHost")]


def without_agents(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Ray's two agents look for a cluster that was killed for a minute before they end."""
    return [each for each in processes if not _is_called(each, "ray::DashboardAgent", "ray::RuntimeEnvAgent")]


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert not alive, f"left: {alive}"


def wait_no_hosts(processes: Callable[[], list[psutil.Process]]) -> None:
    """Until there are no actors of Farsight: one may have been on its way when those that were there ended."""
    wait_until(lambda: not hosts_among(processes()), "actors of Farsight are left")


def _is_called(process: psutil.Process, *names: str) -> bool:
    return any(word.startswith(names) for word in command_of(process)[:1])


def command_of(process: psutil.Process) -> list[str]:
    """Its words; none if it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
