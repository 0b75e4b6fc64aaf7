"""What a start finds: a raylet that does not come up in time, and what a server that was killed has left on disk."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import LONG_S, Server, kill_all, one_ingress, start_server, wait_until

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, os, sys, threading, time
import psutil

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from farsight.services.launch import cluster
from farsight.services.launch.signals import StopSignal
from farsight.services.launch.stages import Stages

first = []  # processes of the first try
start_ray, waits = cluster._try_ray, iter([2.0])


def suspend():
    # As good as a machine that gives it no time.
    while True:
        for child in psutil.Process().children():
            if child.name() == "raylet":
                child.suspend()
                first.extend(psutil.Process().children())
                return
        time.sleep(0.001)


threading.Thread(target=suspend, daemon=True).start()
cluster.HURRIED_S = 0.0
cluster._try_ray = lambda ports, wait_s, dashboard: start_ray(ports, next(waits, 600.0), dashboard=dashboard)
said = []
with cluster.private_cluster(StopSignal(), stages=Stages(said.append, 600.0)):
    import ray

    directory = os.environ["RAY_TMPDIR"]
    facts = {
        "left": [each.pid for each in first if each.is_running() and each.status() != psutil.STATUS_ZOMBIE],
        "first": len(first),
        "sessions": len([each for each in os.listdir(directory) if os.path.isdir(os.path.join(directory, each))]),
        "processors": ray.cluster_resources()["CPU"],
        "answer": ray.get(ray.remote(lambda: 42).remote()),
    }
facts["gone"] = not os.path.exists(directory)
facts["said"] = said
print(json.dumps(facts))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity masks")
def test_a_start_that_lacked_time_is_tried_again_and_knows_its_processors() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    failed, started = [line for line in facts.pop("said") if "not ready" not in line]
    assert failed.startswith("Ray: did not start in "), failed
    assert failed.endswith("(the raylet has not registered for 2 s); trying again with more time."), failed
    assert started.startswith("Ray: started after "), started
    assert facts.pop("first") >= 2
    assert facts == {"left": [], "sessions": 1, "processors": 1.0, "answer": 42, "gone": True}


def ask(server: Server, prompt: list[int]) -> int:
    """Asks for an answer to these tokens; returns how many of them were cached."""
    body = {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    reply = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=LONG_S)
    assert reply.status_code == 200, reply.text
    usage: dict[str, Any] = reply.json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_goes_on_after_kill_9_of_everything(tmp_path: Path) -> None:
    """What a server has written to its disk tier, the next one reads."""
    folder, told, rng = tmp_path / "kv", list[int](), random.Random(1)
    flags = ("--disk-kv", str(folder), *one_ingress(tmp_path))
    first = start_server(tmp_path / "first", *flags)
    try:
        for _ in range(3):
            told += [rng.randrange(3, 250) for _ in range(200)]
            assert ask(first, told) == (len(told) - 200) // 32 * 32
        wait_until(lambda: len(list(folder.rglob("*.kv"))) >= len(told) // 32, "blocks are not written")
    finally:
        processes = [psutil.Process(first.process.pid), *first.children()]
        kill_all(processes)
        first.process.wait(LONG_S)
        first.wait_gone(processes[1:])
    second = start_server(tmp_path / "second", *flags)
    try:
        assert ask(second, [*told, 7, 8]) == len(told) // 32 * 32
        brought = 'farsight:kv_tier_blocks_total{event="disk_brought"}'
        lines = httpx.get(f"{second.base_url}/metrics", timeout=LONG_S).text.splitlines()
        (blocks,) = (float(line.rpartition(" ")[2]) for line in lines if line.startswith(brought))
        assert blocks == len(told) // 32
    finally:
        second.stop()
