"""``GET /v1/requests/{id}/what-if``: what is told to whom, how often, and what a simulation may cost."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator

import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import A100_7B
from farsight.core.decisions import Decision
from farsight.core.errors import FarsightError
from farsight.core.messages.log import FinishedRequest, LoggedWindow, ServedAs, WhatIfQuestion
from farsight.services.api.admin import Administration
from farsight.services.api.pages import what_if
from farsight.services.api.pages.what_if import PER_MINUTE, Turns
from farsight.services.api.pages.what_if_process import WhatIfProcess
from farsight.services.api.text.prompts import PromptEncoder
from farsight.simulator.experiment import Experiment, make_arrivals
from farsight.simulator.run import run
from tests.unit.services.api.api_support import Client, ScriptedBackend, application, client_on
from tests.unit.services.api.test_api_explain import ask, key, trace_of

SERVED = ServedAs('{"scheduler": {"preset": "fcfs"}}', 1, 20_000, 16, A100_7B)
EXPERIMENT = Experiment(
    scheduler=SchedulerConfig(preset="fcfs"), num_requests=60, rate=12.0, kv_tokens=20_000, max_num_seqs=16, seed=4
)
OWN = 50
"""Place of the request that is asked about."""


@pytest.fixture(scope="module")
def window() -> LoggedWindow:
    """As a simulated service has logged it; the others belong to another tenant."""
    arrivals = make_arrivals(EXPERIMENT)
    done = {record.arrival.request_id: record for record in run(EXPERIMENT, arrivals).recorder.done}
    records = []
    for place, each in enumerate(arrivals):
        record, (name, tenant) = done[each.request_id], ("i-0", "own") if place == OWN else (each.request_id, "other")
        lengths = each.prompt_len, each.output_len, each.max_new_tokens
        times = 1e9 + each.arrived_at, record.ttft_s, record.jct_s
        records.append(FinishedRequest(name, "0", 1, *lengths, "stop", *times, tenant=tenant))
    return LoggedWindow("i-0", SERVED, tuple(records))


@pytest.fixture
def http(
    backend: ScriptedBackend, encoder: PromptEncoder, process: WhatIfProcess, monkeypatch: pytest.MonkeyPatch
) -> Client:
    monkeypatch.setattr(what_if, "WhatIfProcess", lambda: process)
    return client_on(application(backend, encoder, administration=Administration("admin")))


@pytest.fixture(scope="module")
def process() -> Iterator[WhatIfProcess]:
    process = WhatIfProcess()
    yield process
    process.close()


async def sent(http: Client, backend: ScriptedBackend, *, ended: bool = True) -> str:
    """The address of an answer that was sent with the key ``mine``."""
    response_id = await ask(http, "mine")
    origin = backend.origins[-1]
    assert origin is not None
    backend.traces = [trace_of(origin, "ingress", Decision("received", 1.0, {}), ended=ended)]
    return f"/v1/requests/{response_id}/what-if"


async def test_the_owner_is_told_what_would_have_been_of_that_request_alone(
    http: Client, backend: ScriptedBackend, window: LoggedWindow
) -> None:
    address = await sent(http, backend)
    backend.logged = window
    reply = await http.get(address, params={"replicas": 3, "priority": -1}, headers=key("mine"))
    body = reply.json()
    assert reply.status_code == 200, body
    told = {"jct_s", "logged_jct_s", "as_simulated", "changed", "is_whole", "text"}
    assert body.keys() == {"id", "object", "choice", "if"} | told
    assert (body["object"], body["if"], body["choice"]) == ("request.what_if", "replicas=3,priority=-1", 0)
    assert body["logged_jct_s"] == pytest.approx(window.records[OWN].jct_s, abs=1e-3)
    assert body["jct_s"] < body["logged_jct_s"]
    assert body["text"].startswith("With replicas=3,priority=-1 it would have taken ")
    same = (await http.get(address, params={"preset": "fcfs"}, headers=key("admin"))).json()
    assert same["jct_s"] == same["logged_jct_s"] and same["text"].endswith("about the same.")


async def test_an_operator_is_told_of_the_latest_requests_together(
    http: Client, backend: ScriptedBackend, window: LoggedWindow
) -> None:
    backend.logged = window
    body = (await http.get("/live/what-if", params={"replicas": 3})).json()
    logged, changed = body["logged"], body["changed"]
    assert (body["if"], body["num_requests"]) == ("replicas=3", len(window.records))
    mean_s = sum(each.jct_s for each in window.records) / len(window.records)
    assert logged["jct_s"] == pytest.approx(mean_s, abs=1e-3)
    assert changed["jct_s"] < logged["jct_s"] and changed["ttft_s"] < logged["ttft_s"]
    assert logged["jct_p99_s"] > 2 * logged["jct_s"]
    assert body["text"].startswith("With replicas=3 the last 60 requests would have ended after ")
    same = (await http.get("/live/what-if", params={"preset": "fcfs"})).json()
    assert same["changed"] == same["logged"] and same["text"].endswith(": about the same.")
    backend.logged = dataclasses.replace(window, records=())
    refused = await http.get("/live/what-if", params={"preset": "fcfs"})
    assert refused.status_code == 503
    assert "at least one request that has ended" in refused.json()["error"]["message"]
    for params in ({}, {"preset": "best"}, {"replicas": 65}):
        assert (await http.get("/live/what-if", params=params)).status_code == 400


async def test_to_others_the_request_does_not_exist(
    http: Client, backend: ScriptedBackend, window: LoggedWindow
) -> None:
    address = await sent(http, backend)
    backend.logged = window
    for reader in (None, "other", ""):
        reply = await http.get(address, params={"preset": "fcfs"}, headers=key(reader))
        nobodys = f"/v1/requests/cmpl-{'0' * 32}/what-if"
        unknown = await http.get(nobodys, params={"preset": "fcfs"}, headers=key(reader))
        assert reply.status_code == unknown.status_code == 404
        assert reply.text == unknown.text.replace("0" * 32, address.split("/")[3].removeprefix("cmpl-"))
    backend.logged = None
    gone = await http.get(address, params={"preset": "fcfs"}, headers=key("mine"))
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")


async def test_what_cannot_be_answered_says_why(http: Client, backend: ScriptedBackend, window: LoggedWindow) -> None:
    address = await sent(http, backend)
    cases = [
        ({}, "preset", "something that is different"),
        ({"preset": "best"}, "preset", "fcfs"),
        ({"replicas": 0}, "replicas", "from 1 to 64"),
        ({"replicas": 10**9}, "replicas", "from 1 to 64"),
        ({"priority": 2**40}, "priority", "an integer from"),
        ({"preset": "fcfs", "choice": 7}, "choice", "got 7"),
    ]
    for params, field, words in cases:
        reply = await http.get(address, params=params, headers=key("mine"))  # type: ignore[arg-type]
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
        assert words in reply.json()["error"]["message"]
    backend.logged = FarsightError("the log does not answer")
    reply = await http.get(address, params={"preset": "fcfs"}, headers=key("mine"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
    backend.logged = dataclasses.replace(window, records=window.records[:OWN])
    assert (await http.get(address, params={"preset": "fcfs"}, headers=key("mine"))).status_code == 503
    running = await sent(http, backend, ended=False)
    reply = await http.get(running, params={"preset": "fcfs"}, headers=key("mine"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "request_running")


async def test_one_question_at_a_time_and_few_a_minute(
    http: Client, backend: ScriptedBackend, window: LoggedWindow
) -> None:
    address = await sent(http, backend)
    backend.logged = window
    asked = [http.get(address, params={"preset": "past-future"}, headers=key("mine")) for _ in range(4)]
    replies = await asyncio.gather(*asked)
    assert sorted(reply.status_code for reply in replies) == [200, 429, 429, 429]
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert (refused.json()["error"]["code"], refused.headers["Retry-After"]) == ("what_if_busy", "1")


def test_questions_of_each_key_are_counted_for_a_minute() -> None:
    turns = Turns()
    for number in range(PER_MINUTE):
        assert turns.take(b"a", float(number)) == 0.0
        turns.give_back()
    assert turns.take(b"a", 20.0) == 40.0
    assert turns.take(b"b", 20.0) == 0.0
    assert turns.take(b"c", 20.0) > 0, "b's runs"
    turns.give_back()
    assert turns.take(b"a", 60.0) == 0.0
    for number in range(5000):
        turns.take(b"%d" % number, 61.0)
    assert len(turns._asked) <= what_if.MAX_KEYS


def test_a_process_that_is_ended_is_replaced(window: LoggedWindow) -> None:
    """As when the kernel ends it for want of time or memory; nothing of one question is left for the next."""
    process = WhatIfProcess()
    question = WhatIfQuestion(window, "past-future")
    first = process.ask(question)
    assert process._child is not None
    os.kill(process._child.pid, signal.SIGKILL)
    with pytest.raises(FarsightError, match="was stopped"):
        process.ask(question)
    assert process.ask(question) == first == process.ask(question)
    process.close()
