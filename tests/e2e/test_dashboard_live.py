"""The dashboard over a real service whose processes are killed: red, and green again."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from services.commands.ask import ask
from services.launch.launch import EMBEDDED_NAME
from tests.e2e.pages.test_dashboard_page import chromium_path, open_page, start_browser
from tests.e2e.server import LONG_S, Server, start_server, wait_until

NOTE_RED = """name => {
  const card = document.querySelector(`[data-testid="card-${name}"]`);
  const note = () => { if (card.dataset.level === "bad") window.redAt ??= Date.now(); };
  new MutationObserver(note).observe(card, {attributes: true});
  return Date.now();
}"""
"""Notes when the card of that name turns red, however short that lasts; returns what time it is."""

READY_COLOUR = """name => {
  const card = document.querySelector(`[data-testid="card-${name}"]`);
  return card.dataset.state === "ready" && getComputedStyle(card.querySelector(".state")).color;
}"""

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="neither chromium nor google-chrome is installed")


@pytest.fixture(scope="module")
def split_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--placement", "split", "--log-format", "json", "--access-log")
    running = start_server(tmp_path_factory.mktemp("dashboard") / "server.log", *flags)
    yield running
    running.stop()


@pytest.fixture
def page(split_server: Server) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = start_browser(playwright)
        opened = open_page(browser)
        opened.goto(f"{split_server.base_url}/dashboard")
        expect(opened.get_by_test_id("overall")).to_have_text(re.compile("All .* components ready"))
        yield opened
        browser.close()


def ready_colour(page: Page, name: str) -> str:
    """The colour of a component, once it is ready: on a busy machine one that answers late is shown as dead for a
    moment."""
    found: list[str] = []

    def is_ready() -> bool:
        found[:] = filter(None, [page.evaluate(READY_COLOUR, name)])
        return bool(found)

    wait_until(is_ready, f"{name} is not ready")
    return found[0]


@pytest.mark.parametrize("name", ["router", "worker-0"])
def test_a_killed_service_turns_red_and_then_green(split_server: Server, page: Page, tmp_path: Path, name: str) -> None:
    card = page.get_by_test_id(f"card-{name}")
    green = ready_colour(page, name)
    pid = split_server.pid_of(name)
    restarts = int(card.locator("[data-field=restarts]").inner_text())
    page.evaluate(NOTE_RED, name)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: page.evaluate("window.redAt"), "it does not turn red")
    page.screenshot(path=tmp_path / "red.png")
    expect(card).to_have_attribute("data-state", "ready")
    assert ready_colour(page, name) == green
    assert split_server.pid_of(name) != pid
    expect(card.locator("[data-field=restarts]")).to_have_text(str(restarts + 1))
    expect(page.get_by_test_id("overall")).to_have_text(re.compile("All .* components ready"))
    page.screenshot(path=tmp_path / "green.png")


def complete(server: Server, prompt: str) -> str:
    """The id of an answer to a request without a key, as the page has none."""
    body = {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": 16}
    answer = ask(server.base_url, "/v1/completions", LONG_S, body=body)
    return str(answer["id"])


def test_the_log_names_the_answer_and_holds_no_prompt(split_server: Server) -> None:
    prompt = "no log may hold this"
    response_id = complete(split_server, prompt)

    def line() -> list[dict[str, object]]:
        return [json.loads(each) for each in split_server.log.read_text().splitlines() if response_id in each]

    wait_until(line, "no line has the id of the answer")
    [found] = line()
    assert (found["path"], found["status"], str(found["process"])[:8]) == ("/v1/completions", 200, "ingress-")
    assert prompt not in split_server.log.read_text()
