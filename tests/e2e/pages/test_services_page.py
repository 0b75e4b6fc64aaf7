"""The page of each kind of component, the loads of replicas and the prefix tree, in a real browser."""

from __future__ import annotations

import dataclasses
import re
import time

from playwright.sync_api import Page, expect

from farsight.core.decisions import Decision, Facts, pack_decisions
from farsight.core.messages.placement import PlacementView
from farsight.core.messages.series import (
    ComponentsReply,
    LifeEvent,
    RecentDecisions,
    SeriesColumn,
    TableReply,
    TableRow,
)
from tests.e2e.pages.test_dashboard_page import (
    PIECES,
    PLACEMENTS,
    LiveServer,
    chromium_path,
    component,
    visit,
    with_state,
)
from tests.e2e.pages.test_pages_over_time import HOSTILE, page, pytestmark

__all__ = ["chromium_path", "page", "pytestmark"]  # a fixture and a mark

NUM = 60


def table(*names: str, **columns: tuple[float | None, ...]) -> TableReply:
    now = time.time()
    at = tuple(now - NUM + second for second in range(NUM))
    return TableReply(
        at, tuple(TableRow(name, tuple(SeriesColumn(*each) for each in columns.items())) for name in names), 2
    )


def lives(*names: str, kind: str = "ModelWorker") -> ComponentsReply:
    health = (0.0,) * 20 + (2.0,) * 10 + (1.0,) * 5 + (0.0,) * 25
    columns = {"health": health, "restarts": (0.0,) * 30 + (1.0,) * 30, "queue": (3.0,) * NUM}
    lines = table(*names, **columns, steps=(12.0,) * NUM, **{HOSTILE: (1.0,) * NUM})
    return ComponentsReply(lines, (LifeEvent(time.time(), names[0], kind, "restarted", f"killed {HOSTILE}"),))


def decisions(component: str) -> tuple[RecentDecisions, ...]:
    facts = {"replica": HOSTILE, "reason": "in turn"}
    told = pack_decisions([Decision("placed", 5.0, facts), Decision(HOSTILE, 6.0, {"n": 3})])
    return (RecentDecisions(component, told),)


def test_every_kind_has_its_page(page: Page, filled: LiveServer) -> None:
    image = component("image-encoder-0", "ImageEncoder")
    hostile = component(f"x-{HOSTILE}", f"Kind {HOSTILE}", last_end=HOSTILE, degraded=HOSTILE)
    filled.backend.components = (*PIECES, image, hostile)
    visit(page, filled, "/dashboard/services")
    kinds = page.get_by_test_id("kinds").locator("a")
    expect(kinds).to_have_count(len({row.kind for row in filled.backend.components}))
    for kind in dict.fromkeys(row.kind for row in filled.backend.components):
        rows = [row for row in filled.backend.components if row.kind == kind]
        filled.backend.lives = lives(*(row.name for row in rows), kind=kind)
        filled.backend.decided = decisions(rows[0].name)
        link = page.get_by_test_id(f"kind-{kind}")
        link.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_test_id("kind")).to_have_text(kind)
        expect(link).to_have_attribute("aria-current", "page")
        expect(page.get_by_test_id("components").locator("tbody tr")).to_have_count(len(rows))
        expect(page.get_by_test_id("lives").locator("svg")).to_have_count(len(rows))
        lane = page.get_by_test_id("lives").locator("svg").first
        expect(lane).to_have_attribute("aria-label", re.compile("down from .* for 10.*not ready from .* for 5"))
        charts = page.get_by_test_id("service-charts")
        expect(charts.locator("canvas")).to_have_count(4)  # queue, restarts, steps, and what the hostile one counts
        expect(page.get_by_test_id("chart-steps")).to_contain_text(re.compile("Steps a second.*12"))
        expect(charts).to_contain_text(f"{HOSTILE} a second")
        expect(page.get_by_test_id("events")).to_contain_text(f"restarted: killed {HOSTILE}")
        expect(page.get_by_test_id("decisions")).to_contain_text(f"The router placed it on replica {HOSTILE} (in turn)")
    assert set(filled.backend.kinds) >= {row.kind for row in filled.backend.components}
    page.reload()  # the address names the kind
    expect(page.get_by_test_id("kind")).to_have_text(hostile.kind)


def test_what_a_learner_has_learned(page: Page, filled: LiveServer) -> None:
    visit(page, filled, "/dashboard/services#LengthPredictor")
    expect(page.get_by_test_id("versions")).to_contain_text("length-predictor words")
    page.get_by_test_id("kind-ServingTimeEstimator").click()
    expect(page.get_by_test_id("versions")).to_contain_text("nothing learned yet")
    page.get_by_test_id("kind-Router").click()
    expect(page.get_by_test_id("versions")).to_be_hidden()


def test_a_death_turns_kind_row_and_pill_red(page: Page, filled: LiveServer) -> None:
    visit(page, filled, "/dashboard/services#ModelWorker")
    row, kind = page.get_by_test_id("row-worker-1").locator(".state"), page.get_by_test_id("kind-ModelWorker")
    expect(kind).to_have_attribute("data-level", "ok")
    filled.backend.components = with_state("worker-1", "dead")
    for each in (row, kind, page.get_by_test_id("health")):
        expect(each).to_have_attribute("data-level", "bad")
    filled.backend.components = PIECES
    for each in (row, kind, page.get_by_test_id("health")):
        expect(each).to_have_attribute("data-level", "ok")


def test_a_day_is_asked_for_by_a_button(page: Page, filled: LiveServer) -> None:
    filled.backend.lives = lives("worker-0", "worker-1")
    visit(page, filled, "/dashboard/services#ModelWorker")
    expect(page.get_by_test_id("chart-queue")).to_contain_text("worker-1")
    with page.expect_request(re.compile(r"live\?.*components.*step=minute")):
        page.get_by_test_id("range-86400").click()
    expect(page.get_by_test_id("range-86400")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_test_id("chart-queue")).to_contain_text("worker-1")


def test_loads_of_replicas_over_time(page: Page, filled: LiveServer) -> None:
    columns = {
        "requests": (4.0,) * NUM,
        "work_tokens": (900.0,) * NUM,
        "waiting": (2.0,) * NUM,
        "kv_used": (0.5,) * NUM,
    }
    filled.backend.loads = table("0", "1", HOSTILE, **columns)
    visit(page, filled, "/dashboard/placement")
    expect(page.get_by_test_id("loads").locator("canvas")).to_have_count(4)
    expect(page.get_by_test_id("chart-kv_used")).to_have_attribute(
        "aria-label", re.compile(r"KV memory in use: .*50 %")
    )
    expect(page.get_by_test_id("loads")).to_contain_text(HOSTILE)
    expect(page.locator("#left-out")).to_have_text("Not drawn: 2 more replicas.")


def test_the_prefix_tree_is_an_icicle(page: Page, filled: LiveServer) -> None:
    deep = PLACEMENTS.prefixes[0]
    filled.backend.placements = dataclasses.replace(
        PLACEMENTS, prefixes=(*PLACEMENTS.prefixes, dataclasses.replace(deep, replicas=(HOSTILE,), num_recent=0))
    )
    visit(page, filled, "/dashboard/placement")
    nodes = page.get_by_test_id("icicle").locator("g")
    expect(nodes).to_have_count(6)
    widths = nodes.locator("rect.frame").evaluate_all("all => all.map(each => Number(each.getAttribute('width')))")
    assert widths[0] > widths[4] > widths[1] > widths[3] > widths[2] > widths[5] > 0
    places = nodes.locator("rect.frame").evaluate_all("all => all.map(each => Number(each.getAttribute('x')))")
    assert places[0] == places[1] == places[2] < places[3] < places[4] < places[5]
    expect(nodes.nth(0).locator("rect.held")).to_have_count(2)  # two replicas cache it
    nodes.nth(1).focus()
    said = "Tokens 1,024 to 1,536 of prompts: 31 recent requests, 6 in flight; cached on 0."
    expect(page.get_by_test_id("node")).to_have_text(said)
    nodes.nth(5).hover(force=True)
    expect(page.get_by_test_id("node")).to_contain_text(f"cached on {HOSTILE}")
    filled.backend.placements = PlacementView("round-robin")
    expect(page.locator("#tree")).to_be_hidden()


def test_batches_are_on_the_scheduler_page_in_batch_mode(page: Page, filled: LiveServer) -> None:
    pulled: Facts = {"replica": "0", "batch_size": 5, "batch_len": 70, "generation_len": 40, "waste_tokens": 120}
    ended: Facts = {"replica": "0", "num_requests": 5, "batch_len": 70, "generation_len": 44, "predicted_len": 40}
    told = [
        Decision("placed", 5.0, {**pulled, "waste_limit_tokens": 500}),
        Decision("batch_ended", 6.0, {**ended, "took_s": 1.5, "estimated_s": 1.25}),
    ]
    filled.backend.decided = (RecentDecisions("batcher", pack_decisions(told)),)
    visit(page, filled, "/dashboard/scheduler")
    rows = page.get_by_test_id("batches").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text(re.compile("ended.*0.*5.*70.*44 of 40.*1.50 s of 1.25 s"))
    expect(rows.nth(1)).to_contain_text(re.compile("pulled.*0.*5.*70.*40.*120 of 500"))
    filled.backend.components = tuple(row for row in PIECES if row.kind != "Batcher")
    expect(rows.nth(0)).to_be_hidden()


def test_calibration_and_drift(page: Page, filled: LiveServer) -> None:
    visit(page, filled, "/dashboard/forecasts")
    charts = page.get_by_test_id("forecast-charts")
    expect(charts.locator("canvas")).to_have_count(3)
    expect(page.get_by_test_id("chart-coverage")).to_contain_text(re.compile(r"within the median\s*100 %"))
