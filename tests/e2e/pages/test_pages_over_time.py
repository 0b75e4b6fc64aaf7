"""The pages with time in a real browser: charts, requests and their pages, schedulers and forecasts,
at three widths, light and dark, with names that try to be markup."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect

from farsight.core.decisions import Decision, Facts, pack_decisions
from farsight.core.errors import FarsightError
from farsight.core.messages.live import (
    EndedRequest,
    LiveRequest,
    LiveView,
    MemoryPoint,
    ReplicaLive,
    SessionCounts,
    SessionRow,
)
from farsight.core.messages.log import RequestTrace
from farsight.core.messages.series import SeriesColumn, SeriesReply
from farsight.core.series.service import COLUMNS
from farsight.services.api.pages.dashboard import PAGES
from tests.e2e.pages.test_dashboard_page import (
    LONG_S,
    PIECES,
    LiveServer,
    chromium_path,
    expect_width,
    stop_clock,
    visit,
    watched,
    with_state,
)

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="neither chromium nor google-chrome is installed")

HOSTILE = "<img src=x onerror=window.hacked=1>"
RUNS, WAITS, ENDED = (f"cmpl-{letter * 32}" for letter in "abc")
WIDTHS = (360, 800, 1400)


def row(response_id: str, state: str, age_s: float, **fields: object) -> LiveRequest:
    known = LiveRequest(
        f"i-{response_id[5]}", response_id, 0, HOSTILE, state, age_s, 12, 30, 100, 40.0, 70.0, 42, 0, 0.25, "", 0
    )
    return dataclasses.replace(known, **fields)  # type: ignore[arg-type]


def view() -> LiveView:
    waits = row(WAITS, "waiting", 9.0, output_len=0, waits_for="memory", level=2, prefilled_len=5)
    rows = (row(RUNS, "decode", 1.5, prefilled_len=12), waits)
    known = EndedRequest(ENDED, 0, "stop", 9, 11.0, 0.5, tenant="acme", prompt_len=34, ttft_s=0.12)
    ended = (known, EndedRequest(RUNS, 1, "length", 20, 18.0, 0.7, ago_s=9.0))
    left = (EndedRequest("cmpl-left", 0, "abort", 0, None, 60.0, ago_s=3.0),)
    curve = (MemoryPoint(0, 300), MemoryPoint(10, 500), MemoryPoint(40, 200))
    return LiveView((ReplicaLive("0", 1, 1, 0, 300, 640, curve, rows, ended),), 2, left)


def history() -> SeriesReply:
    now = time.time()
    at = tuple(now - 60 + second for second in range(60))
    columns = tuple(SeriesColumn(name, tuple(0.1 + (each % 7) / 10 for each in range(60))) for name in COLUMNS)
    return SeriesReply(at, columns, (SeriesColumn(HOSTILE, (0.25,) * 60),))


def trace() -> RequestTrace:
    facts: Facts = {"prompt_tokens": 3, "max_new_tokens": 8, "tenant": HOSTILE}
    outlook: Facts = {"state": "running", "output_tokens": 5, "p50_s": 2.1, "p90_s": 3.4}
    began = time.time() - 4.0
    decisions = [
        Decision("received", began, facts),
        Decision("admitted", began + 1.0, {"waited_s": 1.0, "num_admitted": 1, "num_waiting": 0}),
        Decision("first_token", began + 1.5, {"ttft_s": 1.5}),
        Decision("offloaded", began + 2.0, {"computed_tokens": 9, "num_admitted": 1, "num_waiting": 0}),
        Decision("refused", began + 3.0, {"reason": HOSTILE}),
        Decision("outlook", began + 3.5, outlook),
    ]
    return RequestTrace(f"{RUNS}/i-1/ingress", "i-1", 0, b"", HOSTILE, 0, False, 0, pack_decisions(decisions))


@pytest.fixture
def page(browser: Browser, filled: LiveServer) -> Iterator[Page]:
    """A tab that may write no errors to the console either."""
    with watched(browser, filled, 1400, 900) as (opened, wrong):
        opened.on("console", lambda said: wrong.append(said.text) if _is_error(said) else None)
        yield opened


def _is_error(said: ConsoleMessage) -> bool:
    """Chromium itself notes answers 503 and 404: the history is made to fail, and nothing is explained here."""
    return said.type == "error" and not re.search("status of (404|503)", said.text)


def test_charts_of_the_overview(page: Page, filled: LiveServer) -> None:
    visit(page, filled, "/dashboard")
    charts = page.locator("[data-testid^=chart-]")
    expect(charts).to_have_count(8)
    expect(charts.locator("canvas")).to_have_count(8)
    expect(page.get_by_test_id("chart-cost")).to_contain_text(HOSTILE)
    expect(page.get_by_test_id("chart-ttft")).to_contain_text(re.compile(r"p50\s*\d+ ms.*p90.*p99"))
    expect(page.get_by_test_id("chart-memory")).to_have_attribute("aria-label", re.compile("KV memory: in use .* %"))
    page.get_by_test_id("range-86400").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("range-86400")).to_have_attribute("aria-pressed", "true")
    filled.backend.history = FarsightError("the Supervisor does not answer")
    page.get_by_test_id("range-300").click()
    expect(page.locator("#charts-note")).to_contain_text("the Supervisor does not answer")
    filled.backend.history = history()
    expect(page.locator("#charts-note")).to_be_empty()


def test_requests_are_sorted_searched_and_narrowed(page: Page, filled: LiveServer) -> None:
    visit(page, filled, "/dashboard/requests")
    table = page.get_by_test_id("requests")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(5)
    expect(page.get_by_test_id("sums")).to_contain_text("1 running, 3 waiting")
    page.get_by_role("button", name="State").click()
    states = table.locator("tbody td:nth-child(3)")
    expect(states).to_have_text(["waiting", "decode", "ended at its limit", "ended", "abandoned"], use_inner_text=True)
    expect(page.locator("th[aria-sort]")).to_have_attribute("aria-sort", "ascending")
    prompts = table.locator("tbody td:nth-child(5)")  # of the prompt computed so far, and all of it
    expect(prompts).to_have_text(["5 of 12", "12", "0", "34", "0"])
    expect(rows.nth(1)).to_contain_text("30 of 40")
    expect(rows.nth(3)).to_contain_text(re.compile(r"acme.*9 of 11.*120 ms.*500 ms"))
    page.get_by_test_id("search").fill("WINDOW decode")
    expect(rows).to_have_count(1)
    expect(rows.nth(0)).to_contain_text(HOSTILE)
    page.get_by_test_id("search").fill("nothing of the kind")
    expect(page.get_by_test_id("none")).to_have_text("None of them matches.")
    page.get_by_test_id("search").fill("")
    page.get_by_test_id("choose-tenant").select_option("acme")
    expect(rows).to_have_count(1)
    page.reload()  # the address says what is looked for
    expect(rows).to_have_count(1)
    rows.nth(0).locator("a").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("id")).to_have_text(ENDED)
    expect(page.get_by_test_id("problem")).to_contain_text("expected the 'id' of an answer")


def test_a_request_has_a_page(page: Page, filled: LiveServer) -> None:
    visit(page, filled, "/dashboard/requests")
    page.get_by_test_id("search").fill(f" {RUNS} ")
    page.get_by_test_id("search").press("Enter")
    expect(page.get_by_test_id("id")).to_have_text(RUNS)
    sums = page.get_by_test_id("sums")
    for label, text in (("Tenant", HOSTILE), ("Prompt", "3 tokens"), ("Time to first token", "1.50 s")):
        expect(sums).to_contain_text(f"{label}{text}")
    expect(sums).to_contain_text(re.compile(r"Received.*\d\d:\d\d:\d\d"))
    expect(sums).to_contain_text("Nowends in 2.10 s (9 of 10 times within 3.40 s)")
    expect(page.get_by_test_id("to-requests")).to_have_attribute("aria-current", "page")
    detail = page.get_by_test_id("detail")
    expect(detail).to_contain_text("Request received")
    expect(detail.locator("svg.lane rect")).to_have_count(4)  # waiting, prefill, decode, offloaded
    expect(detail.locator("svg.lane")).to_have_attribute(
        "aria-label", re.compile("waiting 1.00 s, prefill 500 ms, decode")
    )
    expect(detail).to_contain_text(f"Refused: {HOSTILE}")
    detail.locator("summary").first.click()
    expect(detail).to_contain_text("prompt_tokens = 3")
    with page.expect_response(f"**/live/requests/{RUNS}"):
        pass  # it is drawn again, and stays open
    expect(detail).to_contain_text("prompt_tokens = 3")
    expect(page.get_by_test_id("what-if")).to_be_hidden()  # it has not ended


def test_what_if_is_asked_by_a_button_and_its_answer_is_text(page: Page, filled: LiveServer) -> None:
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(json={"text": f"With preset=fcfs it would have taken 4.12 s. {HOSTILE}"})

    page.route("**/what-if?*", answer)
    filled.backend.traces = [dataclasses.replace(trace(), ended=True)]
    visit(page, filled, f"/dashboard/requests/{RUNS}")
    form = page.get_by_test_id("what-if")
    form.get_by_role("button").click()
    expect(page.get_by_test_id("what-if-answer")).to_contain_text("Change at least one")
    assert not asked
    form.get_by_label("Preset").select_option("fcfs")
    form.get_by_label("Replicas").fill("3")
    form.get_by_role("button").click()
    expect(page.get_by_test_id("what-if-answer")).to_contain_text(f"4.12 s. {HOSTILE}")
    [url] = asked
    assert url.endswith("/what-if?preset=fcfs&replicas=3")


def test_schedulers_and_forecasts(page: Page, filled: LiveServer) -> None:
    visit(page, filled, "/dashboard/scheduler")
    panel = page.get_by_test_id("scheduler-0")
    expect(panel).to_contain_text("1 running, 1 waiting, 0 with KV on the host, predicted peak 78 % of 640 tokens")
    expect(panel).to_contain_text("waiting, level 2")
    expect(panel.locator("canvas")).to_have_count(1)
    expect(page.get_by_test_id("chart-moved").locator("canvas")).to_have_count(1)
    page.get_by_test_id("to-forecasts").click()
    expect(page.get_by_test_id("error")).to_contain_text("2 requests: mean error 2 tokens; 50 % of them no longer")
    expect(page.get_by_test_id("versions")).to_contain_text("length-predictor words")


def test_no_number_is_cut_and_every_point_is_seen(page: Page, filled: LiveServer) -> None:
    """At 400 pixels rows are blocks of labelled values; a point without neighbours is drawn; axes count in wholes."""
    history_at = tuple(time.time() - 60 + second for second in range(60))
    lone = tuple(0.3 if second == 30 else None for second in range(60))
    filled.backend.history = SeriesReply(history_at, tuple(SeriesColumn(name, lone) for name in COLUMNS))
    replica = view().replicas[0]
    curve = (MemoryPoint(0, 300), MemoryPoint(1, 500))
    filled.backend.on_replicas = LiveView((dataclasses.replace(replica, curve=curve),))
    page.set_viewport_size({"width": 400, "height": 900})
    visit(page, filled, "/dashboard/requests")
    for column, text in (("Prompt", "12"), ("Output of forecast", "30 of 40")):
        cell = page.get_by_test_id("requests").locator(f'tbody tr[data-id="{RUNS}/0"] td[data-label="{column}"]')
        expect(cell).to_have_text(text)
        find = f'document.querySelector(\'[data-id="{RUNS}/0"] [data-label="{column}"]\').getBoundingClientRect()'
        left, right = page.evaluate(f"(box => [box.left, box.right])({find})")
        assert left >= 0 and right <= 400
    page.set_viewport_size({"width": 1400, "height": 900})
    expect(page.locator("table.stacked")).to_have_count(0)
    visit(page, filled, "/dashboard")
    expect(page.get_by_test_id("chart-ttft").locator("canvas")).to_have_count(1)
    drawn = "charts.find((each) => each.host.closest('[data-testid=chart-ttft]')).plot"
    assert page.evaluate(f"shownPoints({drawn}, 1, false)") == [30]
    assert page.evaluate(f"{drawn}.series[1]._paths !== null")
    assert page.evaluate("[whole(-0.3), amount(-1e-13), counted(1, 'token'), counted(2, 'token')]") == [
        *("0", "0", "1 token", "2 tokens")
    ]
    visit(page, filled, "/dashboard/scheduler")
    expect(page.get_by_test_id("scheduler-0").locator("canvas")).to_have_count(1)
    assert page.evaluate("charts.find((each) => each.spec.xs).plot.axes[0]._values") == ["0", "1"]


def test_the_page_of_forecasts_says_what_makes_them(page: Page, filled: LiveServer) -> None:
    visit(page, filled, "/dashboard/forecasts")
    expect(page.get_by_test_id("health")).to_have_attribute("data-level", "ok")
    expect(page.get_by_test_id("no-forecasts")).to_be_hidden()
    filled.backend.model = dataclasses.replace(filled.backend.model, no_forecasts=f"Preset fcfs makes none. {HOSTILE}")
    expect(page.get_by_test_id("no-forecasts")).to_have_text(f"Preset fcfs makes none. {HOSTILE}")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_no_page_is_wider_than_its_window(browser: Browser, filled: LiveServer, scheme: str, tmp_path: Path) -> None:
    errors: list[str] = []
    tab = browser.new_page(color_scheme=scheme)  # type: ignore[arg-type]
    tab.set_default_timeout(1000 * LONG_S)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    for address, name in PAGES.items():
        visit(tab, filled, address.format(response_id=RUNS))
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            expect_width(tab, width)
        dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
        assert dark == (scheme == "dark")
        tab.screenshot(path=tmp_path / f"{name}-{scheme}.png")
    tab.close()
    assert not errors


def test_sessions_say_what_they_cost_and_are_searched(page: Page, filled: LiveServer) -> None:
    costs = SessionCounts(0, 7, 6, 9_400, 310, 180, 9_216, 650, 12.5, 61.0, 0.4)
    named = SessionRow("build-42", "acme", HOSTILE, True, 1.0, 40.0, 1, costs)
    filled.backend.turns_of = (named, SessionRow("#7", "", "chat", False, 2.0, 49.0, 0, SessionCounts(turns=1)))
    visit(page, filled, "/dashboard/sessions")
    table = page.get_by_test_id("sessions")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text(re.compile("#7.*chat.*away"))  # the latest first
    expect(rows.nth(1)).to_contain_text("in the model10.0 s79,4003101809,21665012.5 s61.0 s400 ms")
    expect(page.get_by_test_id("sums")).to_have_text("2 sessions, 1 in the model")
    table.get_by_role("button", name="State").click()
    expect(rows.nth(0)).to_contain_text("build-42")
    page.get_by_test_id("search").fill("WINDOW build")
    expect(rows).to_have_count(1)
    page.get_by_test_id("search").fill("nothing of the kind")
    expect(page.get_by_test_id("none")).to_have_text("None of them matches.")


@pytest.mark.parametrize(
    "address",
    [
        each if each == "/dashboard/requests" else pytest.param(each, marks=pytest.mark.nightly)
        for each, name in PAGES.items()
        if name not in ("dashboard", "chat")
    ],
)
def test_a_stopped_service_is_red_on_every_page(page: Page, filled: LiveServer, address: str) -> None:
    visit(page, filled, address.format(response_id=RUNS))
    pill = page.get_by_test_id("health")
    expect(pill).to_have_attribute("data-level", "ok")
    stop_clock(page)
    filled.backend.components = with_state("worker-1", "dead")
    expect(pill).to_have_text("Down: worker-1")
    expect(pill).to_have_attribute("data-level", "bad")
    filled.backend.components = PIECES  # the same process as before: it was late, and has not restarted
    expect(pill).to_have_attribute("data-level", "ok")
    filled.backend.components = with_state("worker-1", "ready", pid=4711)  # it died and came back between two polls
    expect(pill).to_have_text("Restarted: worker-1")
    expect(pill).to_have_attribute("data-level", "bad")
