"""``farsight demo`` whole: two real services, a killed worker, an explanation, and an end that leaves nothing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.demo.pages import TOKEN_HEADER
from tests.e2e.server import LONG_S, farsight, wait_until
from tests.free_ports import free_port

AGREEMENT = 0.1


def view(url: str) -> dict[str, Any]:
    shown: dict[str, Any] = httpx.get(f"{url}/race", timeout=LONG_S).json()
    return shown


def test_a_race_goes_on_over_a_kill_and_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    url, record = f"http://127.0.0.1:{port}", tmp_path / "race.json"
    command = farsight("demo", "--requests", "30", "--port", str(port), "--record", str(record), "--json")
    with (tmp_path / "out").open("w") as out:
        demo = subprocess.Popen(command, stdout=out, start_new_session=True)
    try:

        def has_begun() -> bool:
            assert demo.poll() is None
            try:
                return any(lane[1] is not None for lane in view(url)["sides"][1]["lanes"])
            except httpx.TransportError:
                return False

        wait_until(has_begun, "no request got a token")
        found = re.search('TOKEN = "([^"]+)"', httpx.get(url, timeout=LONG_S).text)
        assert found
        killed = httpx.post(f"{url}/kill/1", headers={"Origin": url, TOKEN_HEADER: found[1]}, timeout=LONG_S)
        assert killed.status_code == 200, killed.text
        wait_until(lambda: not psutil.pid_exists(killed.json()["pid"]), "the worker lives")
        wait_until(lambda: view(url)["simulated"] is not None, "the race does not end")
        assert [(side["ended"], side["broken"]) for side in view(url)["sides"]] == [(30, 0), (30, 0)]
        explained = httpx.get(f"{url}/explain/1/0", timeout=LONG_S).json()
        assert explained["choices"][0]["summary"]["finish_reason"] == "stop"
        processes = psutil.Process(demo.pid).children(recursive=True)
        assert len(processes) > 4
        demo.send_signal(signal.SIGINT)
        assert demo.wait(LONG_S) == 0
        assert not psutil.wait_procs(processes, timeout=LONG_S)[1]
    finally:
        demo.kill()
    result = json.loads((tmp_path / "out").read_text())
    assert [side["broken"] for side in result["sides"]] == [0, 0] and result["sides"][1]["kills"] == 1
    assert json.loads(record.read_text())["over"]


@pytest.mark.alone
def test_the_ratio_is_the_simulators() -> None:
    command = farsight("demo", "--once", "--port", str(free_port()), "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert "Both services answer after " in done.stderr, done.stderr
    result = json.loads(done.stdout)
    assert [side["broken"] for side in result["sides"]] == [0, 0]
    assert abs(result["ratio"] / result["simulated"] - 1) <= AGREEMENT, result
