"""The dashboard over a real service whose processes are killed: red, and green again."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from services.api.pages.dashboard import PAGES
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

NOTE_RED_PILL = """() => {
  const pill = document.getElementById("health");
  const note = () => { if (pill.dataset.level === "bad") window.redAt ??= Date.now(); };
  new MutationObserver(note).observe(pill, {attributes: true});
  return Date.now();
}"""
"""The same for the one word of the other pages."""

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


def test_a_killed_worker_is_red_on_every_page(split_server: Server, page: Page) -> None:
    browser = page.context.browser
    assert browser is not None
    tabs: dict[str, Page] = {}
    for address in PAGES:
        if address in ("/dashboard", "/play"):  # the first is tested above, the other shows no component
            continue
        tabs[address] = tab = open_page(browser)
        tab.goto(f"{split_server.base_url}{address}")
        expect(tab.get_by_test_id("health")).to_have_attribute("data-level", "ok")
    began_ms = {address: tab.evaluate(NOTE_RED_PILL) for address, tab in tabs.items()}
    os.kill(split_server.pid_of("worker-0"), signal.SIGKILL)
    for address, tab in tabs.items():
        wait_until(lambda tab=tab: tab.evaluate("window.redAt"), f"{address} does not turn red")  # type: ignore[misc]
        assert began_ms[address] <= tab.evaluate("window.redAt"), address
    for tab in tabs.values():
        expect(tab.get_by_test_id("health")).to_have_attribute("data-level", "ok")
        tab.close()


def test_every_kind_of_a_real_service_has_a_page(split_server: Server, page: Page) -> None:
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.get_by_test_id("to-services").click()
    kinds = {row["kind"] for row in split_server.get("/status")["actors"]}
    expect(page.get_by_test_id("kinds").locator("a")).to_have_count(len(kinds))
    for kind in sorted(kinds):
        page.get_by_test_id(f"kind-{kind}").click()
        expect(page.get_by_test_id("kind")).to_have_text(kind)
        complete(split_server, f"For {kind}")
        for chart in ("queue", "restarts"):
            shown = page.get_by_test_id(f"chart-{chart}")
            expect(shown).to_have_attribute("aria-label", re.compile(r": .* \d"))
            expect(shown.locator("canvas")).to_have_count(1)
        expect(page.get_by_test_id("lives").locator("rect.ready").first).to_be_attached()
    page.get_by_test_id("kind-Router").click()
    expect(page.get_by_test_id("decisions")).to_contain_text("on replica 0 (in turn)")
    page.get_by_test_id("kind-ModelWorker").click()
    expect(page.get_by_test_id("chart-steps").locator("canvas")).to_have_count(1)
    assert not wrong


def complete(server: Server, prompt: str) -> str:
    """The id of an answer to a request without a key, as the page has none."""
    body = {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": 16}
    answer = ask(server.base_url, "/v1/completions", LONG_S, body=body)
    return str(answer["id"])


def is_in_log(server: Server, response_id: str) -> bool:
    try:
        return bool(server.get(f"/v1/requests/{response_id}")["choices"][0]["status"] == "ended")
    except HTTPError:
        return False


def test_what_if_is_answered_by_a_real_simulation(split_server: Server, page: Page) -> None:
    page.get_by_test_id("to-requests").click()
    answer = page.get_by_test_id("what-if-answer")

    def is_simulated() -> bool:
        response_id = [complete(split_server, f"Words {n}") for n in range(12)][-1]  # they tell the cost of steps
        wait_until(lambda: is_in_log(split_server, response_id), "the log does not have it")
        page.get_by_test_id("ended").get_by_title(response_id).click()
        form = page.get_by_test_id("what-if")
        for field, value in (("Preset", "farsight"), ("Replicas", "2"), ("Priority", "-1")):
            form.get_by_label(field).fill(value)
        form.get_by_role("button").click()
        expect(answer).to_contain_text(re.compile("not been measured yet|log still holds|would have|retry in"))
        return "would have" in answer.inner_text()

    wait_until(is_simulated, "no simulation answers")
    expect(answer).to_contain_text("With preset=farsight,replicas=2,priority=-1 it would have taken ")
    expect(answer).to_contain_text(" instead of ")


def test_the_log_names_the_answer_and_holds_no_prompt(split_server: Server) -> None:
    prompt = "no log may hold this"
    response_id = complete(split_server, prompt)

    def line() -> list[dict[str, object]]:
        return [json.loads(each) for each in split_server.log.read_text().splitlines() if response_id in each]

    wait_until(line, "no line has the id of the answer")
    [found] = line()
    assert (found["path"], found["status"], str(found["process"])[:8]) == ("/v1/completions", 200, "ingress-")
    assert prompt not in split_server.log.read_text()


def test_placements_of_a_real_router_are_shown(split_server: Server, page: Page) -> None:
    complete(split_server, "One")
    page.get_by_test_id("to-placement").click()
    expect(page.get_by_test_id("policy")).to_have_text("round-robin")
    expect(page.get_by_test_id("reasons")).to_contain_text("in turn")
    expect(page.get_by_test_id("replicas").locator("tbody tr")).to_have_count(1)
