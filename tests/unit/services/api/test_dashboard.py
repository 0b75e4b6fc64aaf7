"""The pages of operators as files, and what they read: ``/status``, ``/placement``, ``/metrics`` and ``/live``."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
from importlib import resources
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from farsight.core.decisions import Decision, pack_decisions
from farsight.core.errors import FarsightError
from farsight.core.exposition import exposition
from farsight.core.messages.live import (
    EndedRequest,
    LiveRequest,
    LiveView,
    MemoryPoint,
    ReplicaLive,
    SessionCounts,
    SessionRow,
)
from farsight.core.messages.placement import PlacementView, PrefixView, ReasonCount, RecentPlacement, ReplicaView
from farsight.core.messages.series import (
    ComponentsReply,
    LifeEvent,
    RecentDecisions,
    SeriesColumn,
    SeriesReply,
    TableReply,
    TableRow,
)
from farsight.core.request import Origin
from farsight.services.api.pages.dashboard import PAGES, operator_page
from farsight.services.api.pages.live import Recent, RecentByKey
from farsight.services.api.pages.metrics_page import merge_expositions
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import METRICS, Client, ScriptedBackend, client_on, whole_app
from tests.unit.services.api.test_api_explain import trace_of

MARKED = resources.files("farsight.services.api.pages").joinpath("static", "marked", "marked.js")
"""The reader of Markdown: it assigns to fields named ``src``; the tests in a browser see that it asks for nothing."""

REFERENCE = re.compile(r"""(?:\b(?:src|href|action|srcset)=|@import|url\()\s*["']?([^"'\s>)]*)""")


@pytest.mark.parametrize(("address", "page"), PAGES.items())
async def test_a_page_is_served(client: Client, address: str, page: str) -> None:
    reply = await client.get(address.format(response_id="any"))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert reply.text == operator_page(page)
    assert reply.text.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in reply.text  # of the style that both share


@pytest.mark.parametrize("page", sorted(set(PAGES.values())))
def test_a_page_loads_nothing(page: str) -> None:
    text = operator_page(page)
    assert not re.search(r"^ *(/\* [a-z/]+\.css \*/|<!-- [a-z/]+\.html -->|// [a-z/]+\.js)$", text, re.MULTILINE)
    own = text.replace("https://github.com/leeoniya/uPlot", "").replace(MARKED.read_text("utf-8").rstrip(), "")
    assert ("marked.lexer" in text) == (len(own) < len(text) - 10_000)
    references = [each for each in REFERENCE.findall(own) if each]
    assert references
    assert all(reference.startswith(("#", "data:", "`")) for reference in references)
    assert len(re.findall("<script", text)) == len(re.findall("</script", text)) == 1


@pytest.mark.parametrize("page", [*sorted(set(PAGES.values())), "race/race"])
def test_a_page_declares_each_name_once(page: str) -> None:
    """Its shared files become one script: with a name declared twice none of it would run."""
    script = operator_page(page).partition("<script>")[2]
    names = []
    for kind, rest in re.findall(r"^(?:async )?(const|let|class|function)\*? (.+)$", script, re.MULTILINE):
        names += re.findall(r"(?:^|, )(\w+) = ", rest) if kind in ("const", "let") else re.findall(r"^\w+", rest)
    assert len(names) > 20
    assert sorted(set(names)) == sorted(names)


async def test_dashboard_finds_what_it_reads(client: Client) -> None:
    """Every field of a row that the page names is in the reply."""
    status = (await client.get("/status")).json()
    (row,) = status["actors"]
    assert set(re.findall(r"\brow\.(\w+)", operator_page("dashboard"))) <= row.keys()
    assert set(re.findall(r"\bkv\.(\w+)", operator_page("dashboard"))) <= status["kv"].keys()
    assert (row["restarts"], row["http_port"]) == (1, 4321)


async def test_placement_is_told(client: Client, backend: ScriptedBackend) -> None:
    backend.placements = view = PlacementView(
        "e2",
        by_prefixes=True,
        replicas=(ReplicaView("0", True, 3, 120.0, 1.5, 0.5, 640, 1280),),
        prefixes=(PrefixView(0, 64, 64, 5, 2, ("0",)),),
        reasons=(ReasonCount("exploit", 4),),
        recent=(RecentPlacement(1_700_000_000.0, "0", "exploit", 90, 64),),
    )
    reply = (await client.get("/placement")).json()
    assert reply == _plain(dataclasses.asdict(view))
    named = {*reply, *reply["replicas"][0], *reply["prefixes"][0], *reply["reasons"][0], *reply["recent"][0]}
    shown = set(re.findall(r"\b(?:view|each|prefix)\.(\w+)", operator_page("placement")))
    assert shown == named


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


async def test_placement_that_cannot_be_told_is_an_error(client: Client, backend: ScriptedBackend) -> None:
    backend.placements = FarsightError("the Router does not answer")
    reply = await client.get("/placement")
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "the Router does not answer"


async def test_metrics(client: Client) -> None:
    reply = await client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.text == METRICS
    accept = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5"}
    reply = await client.get("/metrics", headers=accept)
    assert reply.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"


async def test_metrics_that_fail_are_an_error(client: Client, backend: ScriptedBackend) -> None:
    async def fail(*, open_metrics: bool) -> str:
        raise FarsightError("no process answers")

    backend.metrics = fail  # type: ignore[method-assign]
    reply = await client.get("/metrics")
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"


@pytest.fixture
def live_client(backend: ScriptedBackend, encoder: PromptEncoder) -> Client:
    """A client of an application of its own: one keeps what it has told for a moment."""
    return client_on(whole_app(backend, encoder))


HOSTILE = "<img src=x onerror=alert(1)>"
RESPONSE_ID = "cmpl-" + "a" * 32
ROW = LiveRequest("i-1", RESPONSE_ID, 0, HOSTILE, "decode", 1.5, 12, 30, 100, 40.0, 70.0, 42, 2, 0.25, "", 1)
ENDED = EndedRequest(RESPONSE_ID, 0, "stop", 9, 11.0, 0.5)
CURVE = (MemoryPoint(0, 42), MemoryPoint(10, 52))
VIEW = LiveView((ReplicaLive("0", 1, 3, 0, 42, 640, CURVE, (ROW,), (ENDED,)),), num_unplaced=2)
HISTORY = SeriesReply(
    (1_700_000_000.12345, 1_700_000_001.0),
    (SeriesColumn("running", (1.0, None)), SeriesColumn("ttft_p50", (0.123456, 2.0))),
    (SeriesColumn(HOSTILE, (0.5, 0.25)),),
    (0.25, None),
)


async def test_history(live_client: Client, backend: ScriptedBackend) -> None:
    backend.history = HISTORY
    reply = (await live_client.get("/live/series?step=second&after=3&span=900")).json()
    assert reply["at"] == [1_700_000_000.123, 1_700_000_001.0]
    assert reply["columns"] == {"running": [1.0, None], "ttft_p50": [0.1235, 2.0]}
    assert reply["tenants"] == {HOSTILE: [0.5, 0.25]}
    assert reply["ttft_s"] == [0.25, None]


TABLE = TableReply((5.0, 6.0), (TableRow(HOSTILE, (SeriesColumn("queue", (1.0, None)),)),), 3)


async def test_several_parts_in_one_answer(live_client: Client, backend: ScriptedBackend) -> None:
    backend.history, backend.on_replicas, backend.loads = HISTORY, VIEW, TABLE
    parts = ("status", "series", "requests", "placement", "replicas")
    reply = (await live_client.get(f"/live?parts={','.join(parts)}&after=3")).json()
    assert tuple(reply) == parts
    for part in ("status", "series", "requests", "replicas"):
        assert reply[part] == (await live_client.get(f"/live/{part}?after=3")).json()
    assert reply["placement"] == (await live_client.get("/placement")).json()
    assert reply["replicas"] == {"at": [5.0, 6.0], "rows": {HOSTILE: {"queue": [1.0, None]}}, "num_left_out": 3}


async def test_a_part_that_cannot_be_read_spares_the_others(live_client: Client, backend: ScriptedBackend) -> None:
    backend.history = FarsightError(f"away: {HOSTILE}")
    reply = (await live_client.get("/live?parts=series,status")).json()
    assert reply["series"]["error"]["message"] == f"away: {HOSTILE}"
    assert reply["status"]["actors"]
    alone = await live_client.get("/live/series")
    assert (alone.status_code, alone.json()["error"]["message"]) == (503, f"away: {HOSTILE}")


async def test_components_of_a_kind(live_client: Client, backend: ScriptedBackend) -> None:
    event = LifeEvent(7.0, "router", "Router", "restarted", HOSTILE)
    backend.lives = ComponentsReply(TABLE, (event,))
    early, late = (pack_decisions([Decision("waits", at, {"reason": HOSTILE})]) for at in (1.0, 2.0))
    backend.decided = (RecentDecisions("a", early), RecentDecisions("b", late))
    reply = (await live_client.get("/live/components?kind=Router")).json()
    assert backend.kinds == ["Router"]
    assert reply["rows"] == {HOSTILE: {"queue": [1.0, None]}}
    assert reply["events"][0]["reason"] == HOSTILE
    assert [each["component"] for each in reply["decisions"]] == ["b", "a"]
    assert reply["decisions"][0]["text"] == "Waits behind other requests."


@pytest.mark.parametrize("parts", ["", "status,", "nothing", "status,<script>", "x" * 300])
async def test_unknown_parts_are_refused(live_client: Client, parts: str) -> None:
    reply = await live_client.get("/live", params={"parts": parts})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "parts")


WRONG = [
    "series?step=hour",
    "series?span=86401",
    "series?after=-1",
    "series?after=x",
    "components",
    f"components?kind={'x' * 65}",
]


@pytest.mark.parametrize("address", WRONG)
async def test_wrong_fields_are_refused(live_client: Client, address: str) -> None:
    assert (await live_client.get(f"/live/{address}")).status_code == 400


async def test_pages_share_one_reading(live_client: Client, backend: ScriptedBackend) -> None:
    asked = [live_client.get("/live?parts=components&kind=Router&after=3") for _ in range(5)]
    assert len({reply.text for reply in await asyncio.gather(*asked)}) == 1
    assert backend.kinds == ["Router"]
    await live_client.get("/live?parts=components&kind=Scheduler&after=3")
    assert backend.kinds == ["Router", "Scheduler"]


async def test_answers_by_key_are_few_and_forgotten() -> None:
    now, read = [0.0], []

    async def answer(key: str) -> str:
        read.append(key)
        return key

    recent = RecentByKey(answer, 1.0, 2, lambda: now[0])
    for key in ("a", "b", "a", "c", "a"):
        assert await recent.get(key) == key
    assert read == ["a", "b", "c", "a"]  # the oldest of three was forgotten
    now[0] = 1.0
    assert await recent.get("c") == "c"
    assert read[4:] == ["c"]
    assert len(recent) == 1


async def test_requests_on_the_replicas(live_client: Client, backend: ScriptedBackend) -> None:
    backend.on_replicas = VIEW
    reply = (await live_client.get("/live/requests")).json()
    assert reply["num_unplaced"] == 2
    (replica,) = reply["replicas"]
    assert replica["curve"] == [{"steps": 0, "tokens": 42}, {"steps": 10, "tokens": 52}]
    assert replica["requests"][0]["tenant"] == HOSTILE
    assert replica["ended"][0]["predicted_len"] == 11.0


async def test_sessions_with_hostile_names(live_client: Client, backend: ScriptedBackend) -> None:
    counts = SessionCounts(turns=2, answers=1, prompt_tokens=90, new_tokens=60, computed_tokens=70)
    backend.turns_of = (SessionRow(HOSTILE, "t", HOSTILE, True, 1.0, 40.0, 1, counts),)
    reply = (await live_client.get("/live/sessions")).json()
    assert (reply["num_sessions"], reply["now"]) == (1, 50.0)
    (row,) = reply["rows"]
    assert row["name"] == row["application"] == HOSTILE and row["counts"]["new_tokens"] == 60
    assert (await live_client.get("/live?parts=sessions")).json()["sessions"] == reply


async def test_the_decisions_about_a_request_of_whichever_tenant(live_client: Client, backend: ScriptedBackend) -> None:
    decision = Decision("received", 1_700_000_000.0, {"prompt_tokens": 3, "max_new_tokens": 8})
    backend.traces = [trace_of(Origin(RESPONSE_ID, 0, b"another tenant's"), "ingress", decision)]
    reply = (await live_client.get(f"/live/requests/{RESPONSE_ID}")).json()
    assert reply["choices"][0]["decisions"][0]["kind"] == "received"
    for unknown in ("cmpl-" + "b" * 32, "x", "..%2f", HOSTILE):
        assert (await live_client.get(f"/live/requests/{unknown}")).status_code == 404


async def test_pages_share_an_answer_for_a_moment() -> None:
    now, reads = [10.0], itertools.count()

    async def read() -> int:
        await asyncio.sleep(0)
        if next(reads) == 2:
            raise FarsightError("away")
        return int(now[0])

    recent = Recent(read, 1.5, lambda: now[0])
    assert await asyncio.gather(*(recent.get() for _ in range(5))) == [10] * 5
    now[0] = 11.4
    assert await recent.get() == 10
    now[0] = 11.5
    assert await recent.get() == 11
    now[0] = 13.0
    with pytest.raises(FarsightError):
        await recent.get()
    assert await recent.get() == 13  # an error is not kept


TTFT = "vllm:time_to_first_token_seconds"


class _Process:
    """One process with a few metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Counter("vllm:generation_tokens", "Tokens.", ["model_name"], registry=self.registry)
        self.ttft = Histogram(TTFT, "TTFT.", ["model_name"], registry=self.registry, buckets=(0.1, 1.0))
        self.steps = Histogram("vllm:iteration_tokens_total", "Steps.", registry=self.registry, buckets=(8, 16))
        self.running = Gauge("vllm:num_requests_running", "Running.", ["engine"], registry=self.registry)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()

    @property
    def open_metrics(self) -> str:
        return exposition(self.registry, open_metrics=True)


def families_of(text: str) -> dict[str, Metric]:
    """The families by name; no family may come twice."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert helps == types
    assert len(set(types)) == len(types)
    return {family.name: family for family in families}


def values_of(family: Metric) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in family.samples}
    assert len(found) == len(family.samples)
    return found


@pytest.fixture
def one() -> _Process:
    return _Process()


@pytest.fixture
def two() -> _Process:
    return _Process()


def test_nothing_gives_nothing() -> None:
    assert merge_expositions({}) == ""
    assert merge_expositions({"router": ""}) == ""


def test_counters_are_summed(one: _Process, two: _Process) -> None:
    one.tokens.labels("tiny").inc(3)
    two.tokens.labels("tiny").inc(4)
    two.tokens.labels("large").inc(5)
    family = families_of(merge_expositions({"ingress-a": one.text, "ingress-b": two.text}))["vllm:generation_tokens"]
    assert family.type == "counter"
    name = "vllm:generation_tokens_total"
    assert values_of(family) == {(name, (("model_name", "tiny"),)): 7, (name, (("model_name", "large"),)): 5}


def test_histograms_are_summed(one: _Process, two: _Process) -> None:
    for process, seconds in ((one, 0.05), (one, 0.5), (two, 0.5), (two, 9.0)):
        process.ttft.labels("tiny").observe(seconds)
        process.steps.observe(10)
    merged = families_of(merge_expositions({"ingress-a": one.text, "ingress-b": two.text}))
    ttft = [(sample.name, sample.labels.get("le"), sample.value) for sample in merged[TTFT].samples]
    buckets = [(f"{TTFT}_bucket", le, count) for le, count in (("0.1", 1), ("1.0", 3), ("+Inf", 4))]
    assert ttft == [*buckets, (f"{TTFT}_count", None, 4), (f"{TTFT}_sum", None, 10.05)]
    assert merged["vllm:iteration_tokens_total"].type == "histogram"
    assert values_of(merged["vllm:iteration_tokens_total"])["vllm:iteration_tokens_total_count", ()] == 4


def test_the_latest_exemplar_of_a_bucket_stays(one: _Process, two: _Process) -> None:
    """And a page is the same whether its processes speak OpenMetrics or not."""
    for process, name in ((one, "first"), (two, "second")):
        process.ttft.labels("tiny").observe(0.5, {"response_id": name})
        process.tokens.labels("tiny").inc(2)
        process.running.labels("0").set(3)
    one.ttft.labels("tiny").observe(5, {"response_id": "slow"})
    texts = {"ingress-a": one.open_metrics, "ingress-b": two.open_metrics}
    page = merge_expositions(texts, open_metrics=True)
    families = {family.name: family for family in open_metrics_families(page)}
    found = {
        sample.labels["le"]: sample.exemplar and sample.exemplar.labels
        for sample in families[TTFT].samples
        if sample.name.endswith("_bucket")
    }
    assert found == {"0.1": None, "1.0": {"response_id": "second"}, "+Inf": {"response_id": "slow"}}
    assert families_of(merge_expositions(texts)) == families_of(
        merge_expositions({"ingress-a": one.text, "ingress-b": two.text})
    )
    assert merge_expositions({"again": page}, open_metrics=True) == page


def test_gauges_get_a_label_only_where_they_collide(one: _Process, two: _Process) -> None:
    one.running.labels("0").set(1)
    two.running.labels("0").set(2)
    two.running.labels("1").set(3)
    family = families_of(merge_expositions({"worker-0": one.text, "worker-1": two.text}))["vllm:num_requests_running"]
    name = "vllm:num_requests_running"
    assert values_of(family) == {
        (name, (("engine", "0"), ("piece_host", "worker-0"))): 1,
        (name, (("engine", "0"), ("piece_host", "worker-1"))): 2,
        (name, (("engine", "1"),)): 3,
    }


def test_one_process_comes_back_as_it_is(one: _Process) -> None:
    one.tokens.labels('a "quoted"\\ name\nin two lines').inc(2.5)
    one.ttft.labels("tiny").observe(0.2)
    one.running.labels("0").set(float("inf"))
    merged = families_of(merge_expositions({"control": one.text}))
    original = {name: family for name, family in families_of(one.text).items() if not name.endswith("_created")}
    assert merged == original
    assert families_of(merge_expositions({"again": merge_expositions({"control": one.text})})) == original


def test_what_is_left_out(one: _Process) -> None:
    Gauge("process_resident_memory_bytes", "Memory.", registry=one.registry).set(1)
    Gauge("python_info", "Python.", registry=one.registry).set(1)
    Gauge("farsight:log_created", "No beginning of a sum.", registry=one.registry).set(1)
    one.tokens.labels("tiny").inc()
    merged = families_of(merge_expositions({"control": one.text}))
    hidden = ("python_", "process_")
    assert not [name for name in merged if name.startswith(hidden)]
    assert [name for name in merged if name.endswith("_created")] == ["farsight:log_created"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('x{y="1} nonsense', "the metrics of worker-7 cannot be read"),
        (
            "# TYPE vllm:num_requests_running histogram\n",
            "worker-7 have vllm:num_requests_running as histogram, others as gauge",
        ),
    ],
)
def test_a_text_that_cannot_be_merged_is_named(one: _Process, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        merge_expositions({"control": one.text, "worker-7": text})
