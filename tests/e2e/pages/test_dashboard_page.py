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
from playwright.sync_api import Browser, Page, Playwright, Route, expect

from farsight.core.errors import FarsightError
from farsight.core.messages.placement import PlacementView, PrefixView, ReasonCount, RecentPlacement, ReplicaView
from farsight.core.messages.series import SeriesColumn, SeriesReply
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
        expect(opened.get_by_test_id("health")).to_contain_text("components ready")
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


def test_large_figures_come_first(page: Page, live: LiveServer) -> None:
    """Over the chosen range, with a unit and what lies behind them; at no width is a number cut."""
    now = time.time()
    steady = {"ended": 2.5, "output_tokens": 12_345.6, "prompt_tokens": 800.0, "waiting": 3.0, "running": 12.0}
    rare = {"abandoned": 0.05, "failed": 0.1, "rejected": 0.2, "gpu_s": 0.8, "kv_used": 0.385, "kv_peak": 0.9}
    columns = tuple(SeriesColumn(name, (value,) * 60) for name, value in (steady | rare).items())
    live.backend.history = SeriesReply(tuple(now - 60 + at for at in range(60)), columns, (), (0.25, 0.5, 101.5))
    for label, number, below in (
        ("requests", "2.50 / s", "150 requests ended"),
        ("tokens", "12.3 k / s", "741.0 k out, 48.0 k in"),
        ("waiting", "3", "12 running; at most 3 waited"),
        ("kv-memory", "39 %", "3 of 8 blocks; peak 90 % predicted"),
        ("abandoned", "3, 6", "6.0 % of all; 12 refusals"),
        ("cost", "0.06 s / 1k", "device seconds per 1,000 output tokens; busy 40 %"),
    ):
        expect(page.get_by_test_id(f"figure-{label}").locator("dd")).to_have_text([number, below])
    first = page.get_by_test_id("figure-first-token").locator("dd")
    expect(first).to_have_text(["250 ms", "time to first token, p50", "102 s", "p90 500 ms"])
    for width in (400, 900, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        expect_width(page, width)
        cut = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent)"
        assert page.get_by_test_id("figures").locator("dd").evaluate_all(cut) == []
    with page.expect_request(re.compile("step=minute.*span=86400")):
        page.get_by_test_id("range-86400").click()


def test_components_are_a_strip_that_opens(page: Page, live: LiveServer) -> None:
    expect(page.get_by_test_id("health")).to_have_text(f"All {len(PIECES)} components ready")
    expect(page.get_by_test_id("model")).to_have_text(MODEL)
    expect(page.get_by_test_id("preset")).to_have_text(re.compile("^.$"))  # a dash: this backend tells of none
    expect(page.get_by_test_id("components")).to_be_hidden()
    page.get_by_test_id("strip").locator("summary").click()
    expect(page.get_by_test_id("components").locator("tbody tr")).to_have_count(len(PIECES))
    expect(page.get_by_test_id("kind-ModelWorker")).to_have_text(re.compile("ModelWorker . 2"))
    worker = page.get_by_test_id("row-worker-1")
    for words in ("worker-1", "ready", "18 ms ago", "pid 123456 · gpu-node-17", "6"):
        expect(worker).to_contain_text(words)
    expect(page.get_by_test_id("row-ingress-0001")).to_contain_text("first one under way")
    url, why, name = "http://10.0.0.5:8000/v1", "open: <b>no connection</b>", "<img src=x onerror=window.hacked=1>"
    backend = component("backend-0", "OpenAIBackend", "waiting", url=url, breaker=why)
    weak = component("log-store", "LogStore", degraded="the disk is full")
    live.backend.components = (*without("log-store"), weak, backend, component(name, "<b>Kind</b>", "unheard-of"))
    live.backend.model = dataclasses.replace(live.backend.model, emulated="a100-7b", preset="fastserve")
    expect(page.get_by_test_id("row-backend-0")).to_contain_text(url)
    expect(page.get_by_test_id("row-backend-0")).to_contain_text(f"breaker {why}")
    expect(page.get_by_test_id("row-log-store").locator(".state")).to_have_text("degraded")
    expect(page.get_by_test_id("row-log-store")).to_contain_text("the disk is full")
    expect(page.get_by_test_id(f"row-{name}").locator(".state")).to_have_attribute("data-level", "warn")
    expect(page.locator("main img, main b:has(img)")).to_have_count(0)
    expect(page.get_by_test_id("preset")).to_have_text("fastserve")
    page.reload()
    expect(page.get_by_test_id("emulated")).to_have_text("The device is emulated (a100-7b): answers are made up.")


def test_a_death_turns_red_for_a_while(page: Page, live: LiveServer) -> None:
    """Whether a poll has seen it or not; a component that was only late is green again at once."""
    page.get_by_test_id("strip").locator("summary").click()
    state, kind = page.get_by_test_id("row-worker-1").locator(".state"), page.get_by_test_id("kind-ModelWorker")
    now = stop_clock(page)
    live.backend.components = with_state("worker-1", "dead", last_step_age_s=3.4)
    expect(state).to_have_text("dead")
    expect(state).to_have_attribute("data-level", "bad")
    expect(kind).to_have_attribute("data-level", "bad")
    expect(page.get_by_test_id("health")).to_have_text("Down: worker-1")
    live.backend.components = PIECES  # the same process as before
    expect(state).to_have_text("ready")
    expect(state).to_have_attribute("data-level", "ok")
    for pid, seen in ((4713, False), (4714, True)):
        if seen:
            live.backend.components = with_state("worker-1", "dead", pid=4713)
            expect(state).to_have_text("dead")
        live.backend.components = with_state("worker-1", "ready", pid=pid, restarts=pid - 4712)
        for later in (0, 2):
            page.clock.set_fixed_time(now + later)
            wait_updated(page)
            expect(state).to_have_text("restarted")
            expect(kind).to_have_attribute("data-level", "bad")
        now += 3
        page.clock.set_fixed_time(now)
        expect(state).to_have_text("ready")
        expect(page.get_by_test_id("health")).to_have_text(f"All {len(PIECES)} components ready")


def test_the_page_asks_every_two_seconds(page: Page) -> None:
    page.clock.install()
    page.reload()
    expect(page.get_by_test_id("health")).to_contain_text("components ready")
    page.clock.pause_at(int(time.time()) + 60)
    wait_updated(page)  # nothing is under way now
    with page.expect_request("**/live?parts=status*"):
        page.clock.run_for(2300)


def test_a_server_that_stops_is_said_and_comes_back(page: Page, live: LiveServer) -> None:
    live.stop()
    banner, main = page.get_by_test_id("banner"), page.locator("main")
    expect(banner).to_contain_text("The server cannot be read: no connection")
    expect(main).to_have_css("filter", "grayscale(1)")
    live.backend.model = dataclasses.replace(live.backend.model, name="successor")
    live.start()
    expect(banner).to_be_hidden()
    expect(main).to_have_css("filter", "none")
    expect(page.get_by_test_id("model")).to_have_text("successor")


def test_another_preset_is_asked_by_a_button(page: Page) -> None:
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        times = {"ttft_s": 0.5, "jct_s": 2.0, "jct_p99_s": 9.0}
        said = "With preset=preble the last 90 requests <b>would</b> have ended"
        route.fulfill(json={"text": said, "logged": times, "changed": times | {"jct_s": 1.5}})

    page.route("**/live/what-if?*", answer)
    page.get_by_test_id("other-preset").select_option("preble")
    page.get_by_test_id("other-ask").click()
    expect(page.get_by_test_id("other-said")).to_contain_text("the last 90 requests <b>would</b> have ended")
    expect(page.get_by_test_id("other")).to_contain_text("end, mean, preble1.50 s")
    assert asked[0].endswith("/live/what-if?preset=preble")


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
