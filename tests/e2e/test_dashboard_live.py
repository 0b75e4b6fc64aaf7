"""The dashboard over a real service whose processes are killed: red, and green again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.e2e.server import Server, start_server
from tests.e2e.test_dashboard_page import CHROMIUM_FLAGS, chromium_path

RED_WITHIN_MS = 5_000
LONG_MS = 90_000

pytestmark = [
    pytest.mark.skipif(chromium_path() is None, reason="neither chromium nor google-chrome is installed"),
    pytest.mark.timeout(300),
    pytest.mark.alone,
]


@pytest.fixture(scope="module")
def split_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(tmp_path_factory.mktemp("dashboard") / "server.log", "--placement", "split")
    yield running
    running.stop()


@pytest.fixture
def page(split_server: Server) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=CHROMIUM_FLAGS)
        opened = browser.new_page(viewport={"width": 1280, "height": 800})
        opened.goto(f"{split_server.base_url}/dashboard")
        expect(opened.get_by_test_id("overall")).to_have_text(re.compile("All .* services ready"), timeout=LONG_MS)
        yield opened
        browser.close()


def pid_of(server: Server, name: str) -> int:
    return next(row["pid"] for row in server.get("/status")["actors"] if row["name"] == name)


def colour(card: Locator) -> str:
    found: str = card.locator(".state").evaluate("pill => getComputedStyle(pill).color")
    return found


@pytest.mark.parametrize("name", ["router", "worker-0", "scheduler-0", "log-store", "supervisor", "length-predictor-0"])
def test_a_killed_service_turns_red_and_then_green(split_server: Server, page: Page, tmp_path: Path, name: str) -> None:
    card = page.get_by_test_id(f"card-{name}")
    green = colour(card)
    pid = pid_of(split_server, name)
    restarts = int(card.locator("[data-field=restarts]").inner_text())
    os.kill(pid, signal.SIGKILL)
    expect(card).to_have_attribute("data-level", "bad", timeout=RED_WITHIN_MS)
    page.screenshot(path=tmp_path / "red.png")
    expect(card).to_have_attribute("data-state", "ready", timeout=LONG_MS)
    assert colour(card) == green
    assert pid_of(split_server, name) != pid
    expect(card.locator("[data-field=restarts]")).to_have_text(str(restarts + 1))
    expect(page.get_by_test_id("overall")).to_have_text(re.compile("All .* services ready"), timeout=LONG_MS)
    page.screenshot(path=tmp_path / "green.png")


def test_placements_of_a_real_router_are_shown(split_server: Server, page: Page) -> None:
    with OpenAI(base_url=f"{split_server.base_url}/v1", api_key="none") as client:
        client.completions.create(model=client.models.list().data[0].id, prompt="One", max_tokens=2)
    page.get_by_test_id("to-placement").click()
    expect(page.get_by_test_id("policy")).to_have_text("round-robin", timeout=LONG_MS)
    expect(page.get_by_test_id("reasons")).to_contain_text("in turn")
    expect(page.get_by_test_id("replicas").locator("tbody tr")).to_have_count(1)
