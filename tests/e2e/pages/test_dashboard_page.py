"""The dashboard in a real browser, over a real HTTP server whose components the test changes at will."""

from __future__ import annotations

import dataclasses
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, Playwright, expect

from farsight.core.decisions import Decision, pack_decisions
from farsight.core.errors import FarsightError
from farsight.core.messages.log import RequestTrace
from farsight.core.messages.placement import PlacementView, PrefixView, ReasonCount, RecentPlacement, ReplicaView
from farsight.core.messages.status import ComponentStatus
from farsight.services.api.text.prompts import PromptEncoder
from tests.e2e.server import wait_until
from tests.free_ports import free_port
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, whole_app

CHROMIUM_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
LONG_S = 120.0
"""For what a busy machine may delay; the page itself asks every two seconds."""

NO_TIME_LIMIT = "AbortSignal.timeout = () => new AbortController().signal;"
"""The page waits for as long as an answer takes: where that is some seconds, no test here is about it."""

LONG_NAME = "ingress-6f1c0b7e2f7d4c1d9a3e-0002"


def chromium_path() -> str | None:
    """A Chromium of the system; Playwright's own is not downloaded."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


pytestmark = pytest.mark.skipif(chromium_path() is None, reason="neither chromium nor google-chrome is installed")
expect.set_options(timeout=1000 * LONG_S)


def component(name: str, kind: str, state: str = "ready", age_s: float | None = 0.2, **fields: Any) -> ComponentStatus:
    row = ComponentStatus(name, kind, 4711, "node-a", state, 0, age_s, restarts=0, http_port=0)
    return dataclasses.replace(row, **fields)


PIECES = (
    component("ingress-0001", "Ingress", queue=12, age_s=None),
    component(LONG_NAME, "Ingress", queue=9, age_s=None),
    component("length-predictor-0", "LengthPredictor", age_s=31.0),
    component("length-predictor-1", "LengthPredictor", age_s=642.0),
    component("router", "Router", queue=21, age_s=0.031),
    component("batcher", "Batcher", queue=3),
    component("serving-time-estimator-0", "ServingTimeEstimator", age_s=4.27),
    component("scheduler-0", "Scheduler", queue=14),
    component("scheduler-1", "Scheduler", queue=7),
    component("kv-offload-manager-0", "KVOffloadManager", age_s=1.25),
    component("kv-offload-manager-1", "KVOffloadManager", age_s=1.5),
    component("worker-0", "ModelWorker", queue=8, age_s=0.012),
    component("worker-1", "ModelWorker", queue=6, age_s=0.018, node="gpu-node-17.cluster.example.org", pid=123456),
    component("log-store", "LogStore", queue=40, age_s=0.9),
    component("supervisor", "Supervisor", age_s=0.5),
)


def with_state(name: str, state: str, **fields: Any) -> tuple[ComponentStatus, ...]:
    """``PIECES``, with one of them in another state."""
    return tuple(dataclasses.replace(row, state=state, **fields) if row.name == name else row for row in PIECES)


def without(name: str) -> tuple[ComponentStatus, ...]:
    return tuple(row for row in PIECES if row.name != name)


class LiveServer:
    """The application on one port, which can be stopped and started again."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.backend = ScriptedBackend()
        self.backend.components = PIECES
        self.port = free_port()
        self._app = whole_app(self.backend, encoder)

    def start(self) -> None:
        config = uvicorn.Config(self._app, port=self.port, log_level="warning", ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + LONG_S
        while not self._server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()


def start_browser(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=chromium_path(), args=CHROMIUM_FLAGS, timeout=1000 * LONG_S)


def open_page(browser: Browser) -> Page:
    opened = browser.new_page(viewport={"width": 1280, "height": 800})
    opened.set_default_timeout(1000 * LONG_S)
    return opened


@contextmanager
def watched(
    browser: Browser, live: LiveServer, width: int = 1280, height: int = 800
) -> Iterator[tuple[Page, list[str]]]:
    """A tab and what goes wrong in it, which fails the test: what it asks of another address, or fails at."""
    opened = browser.new_page(viewport={"width": width, "height": height})
    opened.set_default_timeout(1000 * LONG_S)
    opened.add_init_script(NO_TIME_LIMIT)
    wrong: list[str] = []
    base = f"http://127.0.0.1:{live.port}/"
    opened.on("request", lambda sent: None if sent.url.startswith((base, "data:")) else wrong.append(sent.url))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened, wrong
    assert opened.evaluate("window.hacked") is None
    opened.close()
    assert not wrong


def visit(page: Page, server: LiveServer, address: str) -> None:
    page.goto(f"http://127.0.0.1:{server.port}{address}")


@pytest.fixture
def page(browser: Browser, live: LiveServer) -> Iterator[Page]:
    """The dashboard with its first answer."""
    with watched(browser, live) as (opened, _):
        visit(opened, live, "/dashboard")
        expect(opened.get_by_test_id("overall")).to_contain_text("components ready")
        yield opened


def stop_clock(page: Page) -> int:
    """The page goes on, but has always the same time, in whole seconds, until it is told another one."""
    now = int(time.time())
    page.clock.set_fixed_time(now)
    return now


def wait_updated(page: Page) -> None:
    """Until the page shows an answer that has come at the time that it has now."""
    expect(page.get_by_test_id("updated")).to_have_text(page.evaluate("clock(Date.now())"))


def expect_width(page: Page, most: int) -> None:
    """The page gets no wider than that. Playwright's own waiting would need ``eval``, which the page forbids."""
    wait_until(lambda: page.evaluate("document.documentElement.scrollWidth") <= most, f"wider than {most} pixels")


def test_every_component_has_a_card(page: Page) -> None:
    expect(page.get_by_test_id("overall")).to_have_text(f"All {len(PIECES)} components ready")
    expect(page.get_by_test_id("model")).to_contain_text(MODEL)
    expect(page.get_by_test_id("kv")).to_contain_text("3 of 8 blocks · 38 %")
    expect(page.get_by_test_id("learned")).to_contain_text(re.compile(r"length-predictor words\s*3\s*12.50\s*4000"))
    moved = page.get_by_test_id("kv-moved")
    expect(moved).to_have_text("host: 2 of 6 blocks, 1 in flight · 9 tokens recomputed")
    expect(moved).to_have_attribute("title", "3 offloads (0 MiB), 2 uploads (0 MiB), 1 offload refused")
    expect(page.get_by_test_id("updated")).to_have_text(re.compile(r"\d\d:\d\d:\d\d"))
    expect(page.locator("[data-testid^=card-]")).to_have_count(len(PIECES))
    expect(page.locator("section.group h2")).to_have_count(len({row.kind for row in PIECES}))
    for row in PIECES:
        expect(page.get_by_test_id(f"card-{row.name}")).to_have_attribute("data-state", "ready")
    worker = page.get_by_test_id("card-worker-1")
    for words in ("worker-1", "ready", "18 ms ago", "pid 123456 · gpu-node-17", "6"):
        expect(worker).to_contain_text(words)
    expect(page.get_by_test_id("card-ingress-0001")).to_contain_text("first one under way")
    expect(worker.locator(".breaker")).to_be_hidden()
    expect(page.get_by_test_id("delay")).to_contain_text("1.3 s")
    expect(page.get_by_test_id("banner")).to_be_hidden()
    expect(page.get_by_test_id("emulated")).to_be_hidden()


def test_made_up_answers_are_said_to_be(page: Page, live: LiveServer) -> None:
    live.backend.model = dataclasses.replace(live.backend.model, emulated="a100-7b")
    page.reload()
    expect(page.get_by_test_id("emulated")).to_have_text("The device is emulated (a100-7b): answers are made up.")


def test_twenty_services_are_seen_at_once(page: Page, live: LiveServer) -> None:
    """Without scrolling at 1280x800; and no name makes the page wider than a small window."""
    more = [component(f"{kind}-{index}", "ModelWorker") for index in (2, 3) for kind in ("worker", "scheduler")]
    live.backend.components = (*PIECES, *more, component("kv-offload-manager-2", "KVOffloadManager"))
    expect(page.get_by_test_id("overall")).to_have_text("All 20 components ready")
    bottoms = page.locator(".card").evaluate_all("all => all.map(each => each.getBoundingClientRect().bottom)")
    assert len(bottoms) == 20 and max(bottoms) <= 800  # the charts are below
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        expect_width(page, width)


def test_a_dead_component_turns_red_and_then_green_again(page: Page, live: LiveServer) -> None:
    card = page.get_by_test_id("card-worker-1")
    pill = card.locator(".state")
    green = pill.evaluate("pill => getComputedStyle(pill).color")
    live.backend.components = with_state("worker-1", "dead", queue=0, last_step_age_s=3.4)
    expect(card).to_have_attribute("data-state", "dead")
    expect(card).to_contain_text("3.4 s ago")
    expect(pill).to_have_text("dead")
    expect(pill).not_to_have_css("color", green)
    expect(page.get_by_test_id("overall")).to_have_text(f"1 of {len(PIECES)} down: worker-1")
    live.backend.components = with_state("worker-1", "starting", restarts=1, last_step_age_s=None)
    expect(card).to_have_attribute("data-state", "starting")
    expect(page.get_by_test_id("overall")).to_have_text(f"1 of {len(PIECES)} not ready: worker-1")
    live.backend.components = with_state("worker-1", "ready", restarts=1, queue=5)
    expect(card).to_have_attribute("data-state", "ready")
    expect(pill).to_have_css("color", green)
    expect(card.locator("[data-field=queue]")).to_have_text("5")
    expect(card.locator("[data-field=restarts]")).to_have_text("1")


def test_a_degraded_component_turns_yellow_and_says_why(page: Page, live: LiveServer) -> None:
    card = page.get_by_test_id("card-log-store")
    expect(card.locator(".degraded")).to_be_hidden()
    live.backend.components = with_state("log-store", "ready", degraded="cannot write the log: <b>full</b>")
    expect(card).to_have_attribute("data-state", "degraded")
    expect(card).to_have_attribute("data-level", "warn")
    expect(card.locator(".degraded")).to_have_text("cannot write the log: <b>full</b>")
    expect(page.get_by_test_id("overall")).to_have_text(f"1 of {len(PIECES)} degraded: log-store")
    live.backend.components = PIECES
    expect(card).to_have_attribute("data-state", "ready")
    expect(card.locator(".degraded")).to_be_hidden()


def test_a_death_that_no_poll_has_seen_turns_red_for_a_while(page: Page, live: LiveServer) -> None:
    card = page.get_by_test_id("card-router")
    now = stop_clock(page)
    live.backend.components = with_state("router", "ready", pid=4712, restarts=1)
    expect(card).to_have_attribute("data-state", "restarted")
    expect(card).to_have_attribute("data-level", "bad")
    expect(page.get_by_test_id("overall")).to_have_text(f"1 of {len(PIECES)} just restarted: router")
    page.clock.set_fixed_time(now + 2)
    wait_updated(page)
    expect(card).to_have_attribute("data-state", "restarted")
    page.clock.set_fixed_time(now + 3)
    expect(card).to_have_attribute("data-state", "ready")
    expect(page.get_by_test_id("overall")).to_have_text(f"All {len(PIECES)} components ready")


def test_a_death_that_one_poll_has_seen_stays_red_for_a_while(page: Page, live: LiveServer) -> None:
    """The next poll may follow at once, where the one that saw it had to wait for the dead component."""
    card = page.get_by_test_id("card-worker-1")
    now = stop_clock(page)
    live.backend.components = with_state("worker-1", "dead")
    expect(card).to_have_attribute("data-state", "dead")
    live.backend.components = PIECES  # the same process as before: it was late, and has not restarted
    expect(card).to_have_attribute("data-state", "ready")
    live.backend.components = with_state("worker-1", "dead")
    expect(card).to_have_attribute("data-state", "dead")
    live.backend.components = with_state("worker-1", "ready", pid=4712, restarts=1)
    for later in (0, 2):
        page.clock.set_fixed_time(now + later)
        wait_updated(page)
        expect(card).to_have_attribute("data-state", "restarted")
        expect(card).to_have_attribute("data-level", "bad")
    page.clock.set_fixed_time(now + 3)
    expect(card).to_have_attribute("data-state", "ready")


def test_the_page_asks_every_two_seconds(page: Page) -> None:
    page.clock.install()
    page.reload()
    expect(page.get_by_test_id("overall")).to_contain_text("components ready")
    page.clock.pause_at(int(time.time()) + 60)
    wait_updated(page)  # nothing is under way now
    with page.expect_request("**/live?parts=status*"):
        page.clock.run_for(2300)


def test_a_component_that_disappears_stays_for_a_minute(page: Page, live: LiveServer) -> None:
    card = page.get_by_test_id("card-scheduler-1")
    expect(card).to_have_attribute("data-state", "ready")
    now = stop_clock(page)
    live.backend.components = without("scheduler-1")
    expect(card).to_have_attribute("data-state", "gone")
    expect(page.get_by_test_id("overall")).to_have_text(f"1 of {len(PIECES)} down: scheduler-1")
    page.clock.set_fixed_time(now + 40)
    expect(card).to_contain_text(re.compile(r"Gone for\s*40 s"))
    page.clock.set_fixed_time(now + 60)
    expect(card).to_have_count(0)
    expect(page.get_by_test_id("overall")).to_have_text(f"All {len(PIECES) - 1} components ready")


def test_a_server_that_stops_is_said_and_comes_back(page: Page, live: LiveServer) -> None:
    live.stop()
    banner = page.get_by_test_id("banner")
    expect(banner).to_contain_text("/status cannot be reached: no connection")
    card = page.get_by_test_id("card-router")
    expect(card).to_have_attribute("data-stale", "true")
    expect(card).to_have_css("filter", "grayscale(1)")
    expect(card.locator(".state")).to_have_text("was ready")
    expect(page.get_by_test_id("overall")).to_have_text("State unknown")
    live.backend.model = dataclasses.replace(live.backend.model, name="successor")
    live.start()
    expect(banner).to_be_hidden()
    expect(card).to_have_attribute("data-stale", "false")
    expect(card).to_have_css("filter", "none")
    expect(page.get_by_test_id("overall")).to_have_text(f"All {len(PIECES)} components ready")
    expect(page.get_by_test_id("model")).to_contain_text("successor")


def test_names_are_shown_and_not_run(page: Page, live: LiveServer) -> None:
    name = "<img src=x onerror=alert(1)>"
    live.backend.components = (*PIECES, component(name, "<b>Kind</b>", "unheard-of"))
    card = page.locator("[data-state=unheard-of]")
    expect(card).to_contain_text(name)
    expect(card).to_have_attribute("data-level", "warn")
    expect(page.locator("main img, main b")).to_have_count(0)


def test_a_request_is_explained_and_an_unknown_one_is_said_to_be(page: Page, live: LiveServer) -> None:
    response_id = "cmpl-" + "0" * 32
    page.get_by_test_id("explain-id").fill(f" {response_id} ")
    page.get_by_test_id("explain-id").press("Enter")
    expect(page.get_by_test_id("explain-note")).to_contain_text("expected the 'id' of an answer")
    expect(page.get_by_test_id("explained")).to_be_hidden()
    decisions = [Decision("received", 0.0, {"prompt_tokens": 7, "max_new_tokens": 20})]
    decisions += [Decision("refused", 1.5, {"reason": "<b>too long</b>"})]
    packed = pack_decisions(decisions)
    live.backend.traces = [RequestTrace(f"{response_id}/i-0/ingress", "i-0", 0, b"", "ingress", 0, True, 0, packed)]
    page.get_by_role("button", name="Explain").click()
    rows = page.get_by_test_id("explained").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("prompt of 7 tokens")
    expect(rows.nth(1)).to_contain_text("1.500 singressRefused: <b>too long</b>.")
    expect(page.get_by_test_id("explain-note")).to_be_empty()


PLACEMENTS = PlacementView(
    "e2",
    by_prefixes=True,
    replicas=(
        ReplicaView("10", False, 0, 0.0, 0.0, 0.0, 0, 26_880),
        ReplicaView("0", True, 14, 21_400.0, 6.4, 2.1, 20_992, 26_880),
        ReplicaView("1", True, 9, 12_250.0, 2.2, 3.9, 17_024, 26_880),
        ReplicaView("2", True, 11, 15_020.0, 3.1, 2.8, 26_624, 26_880),
    ),
    prefixes=(
        PrefixView(0, 1024, 1024, 58, 14, ("0", "2")),
        PrefixView(1, 512, 1536, 31, 6, ("0",)),
        PrefixView(2, 256, 1792, 17, 3, ("0",)),
        PrefixView(1, 640, 1664, 27, 8, ("2",), assigned=("1",)),
        PrefixView(0, 2048, 2048, 40, 9, ("1",)),
    ),
    reasons=(ReasonCount("exploit", 204), ReasonCount("explore", 61), ReasonCount("rebalance", 9)),
    recent=(
        RecentPlacement(1_700_000_012.0, "2", "exploit", 1702, 1664),
        RecentPlacement(1_700_000_011.5, "1", "<i>explore</i>", 820, 0),
    ),
)


def test_placement_is_shown(page: Page, live: LiveServer, tmp_path: Path) -> None:
    """Load by replica, reasons, and who caches which prefix; in a small window nothing is wider than that."""
    live.backend.placements = PLACEMENTS
    page.get_by_test_id("to-placement").click()
    expect(page.get_by_test_id("policy")).to_have_text("e2")
    replicas = page.get_by_test_id("replicas").locator("tbody tr")
    expect(replicas).to_have_count(4)
    expect(replicas.nth(0)).to_contain_text("014" + "21,4008.5 s" + "20,992 of 26,880")
    expect(replicas.nth(3)).to_contain_text("10 (accepts no requests)")
    expect(page.get_by_test_id("reasons").locator("tbody tr").nth(2)).to_contain_text("rebalance9")
    prefixes = page.get_by_test_id("prefixes")
    expect(prefixes.locator("thead .cell")).to_have_text(["0", "1", "2"])
    expect(prefixes.locator("tbody tr").nth(0).locator(".cached")).to_have_count(2)
    expect(prefixes.locator("tbody tr").nth(3).locator(".assigned")).to_have_attribute("title", "1: assigned")
    indents = prefixes.locator("tbody td:first-child").evaluate_all("all => all.map(each => each.style.paddingLeft)")
    assert indents == ["0px", "16px", "32px", "16px", "0px"]
    expect(page.get_by_test_id("recent").locator("tbody tr").nth(1)).to_contain_text("<i>explore</i>8200")
    page.screenshot(path=tmp_path / "placement.png")
    page.set_viewport_size({"width": 390, "height": 800})
    expect_width(page, 390)
    live.backend.placements = FarsightError("the Router does not answer")
    expect(page.get_by_test_id("banner")).to_contain_text("the Router does not answer")


def test_placement_without_prefixes_shows_no_tree(page: Page, live: LiveServer) -> None:
    live.backend.placements = PlacementView("round-robin", replicas=(ReplicaView("0", True, 3, 90.0),))
    page.get_by_test_id("to-placement").click()
    expect(page.get_by_test_id("replicas")).to_contain_text("0390")
    expect(page.get_by_test_id("replicas").locator("thead .cached")).to_be_hidden()
    expect(page.locator("#tree")).to_be_hidden()


def test_another_server_is_shown_with_its_address_and_breaker(page: Page, live: LiveServer) -> None:
    url, why = "http://10.0.0.5:8000/v1", "open: <b>no connection</b>"
    live.backend.components = (*PIECES, component("backend-0", "OpenAIBackend", "waiting", url=url, breaker=why))
    card = page.get_by_test_id("card-backend-0")
    expect(card.locator(".process")).to_have_text(url)
    expect(card.locator(".breaker")).to_have_text(f"breaker {why}")
    expect(card).to_contain_text("Last answer")
    expect(page.get_by_test_id("overall")).to_contain_text("not ready: backend-0")
