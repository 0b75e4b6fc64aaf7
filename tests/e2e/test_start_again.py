"""A real Ray whose raylet does not come up in time: it is cleaned up whole, and the next try serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import LONG_S

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
