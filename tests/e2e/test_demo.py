"""``farsight demo`` whole: two services, its page in a browser, a killed worker, and an end that leaves nothing."""

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
from playwright.sync_api import expect, sync_playwright

from tests.e2e.pages.test_dashboard_page import chromium_path, open_page, start_browser
from tests.e2e.server import LONG_S, farsight, wait_until
from tests.free_ports import free_port


def view(url: str) -> dict[str, Any]:
    shown: dict[str, Any] = httpx.get(f"{url}/race", timeout=LONG_S).json()
    return shown


@pytest.mark.skipif(chromium_path() is None, reason="neither chromium nor google-chrome is installed")
def test_a_race_is_seen_goes_on_over_a_kill_and_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    url, record = f"http://127.0.0.1:{port}", tmp_path / "race.json"
    problems: list[str] = []
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
        with sync_playwright() as playwright:
            browser = start_browser(playwright)
            page = open_page(browser)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
            page.goto(url)
            side = page.get_by_test_id("side-1")
            for each in (page.get_by_test_id("side-0"), side):
                expect(each.locator("svg rect").first).to_be_attached()
            side.get_by_test_id("kill").click()
            said = side.get_by_role("status")
            expect(said).to_have_text(re.compile(r"process \d+ got SIGKILL"))
            pid = int(said.inner_text().split()[1])
            wait_until(lambda: not psutil.pid_exists(pid), "the worker lives")
            side.get_by_test_id("lanes").press("ArrowDown")
            side.get_by_test_id("lanes").press("Enter")
            expect(page.get_by_test_id("explanation")).to_contain_text("Request received")
            expect(page.get_by_test_id("simulated")).to_have_text(re.compile(r"\d\.\d\d"))
            expect(page.get_by_test_id("broken")).to_have_text("0")
            browser.close()
        assert problems == []
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
