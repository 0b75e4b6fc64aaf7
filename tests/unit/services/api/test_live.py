"""``/live``: the history, the requests on the replicas and their decisions, and who may see them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from core.decisions import Decision, pack_decisions
from core.errors import FarsightError
from core.messages.live import EndedRequest, LiveRequest, LiveView, MemoryPoint, ReplicaLive
from core.messages.log import RequestTrace
from core.messages.series import (
    ComponentsReply,
    LifeEvent,
    RecentDecisions,
    SeriesColumn,
    SeriesReply,
    TableReply,
    TableRow,
)
from services.api.pages.recent import Recent, RecentByKey
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.access.access_support import guarded_server
from tests.unit.services.api.api_support import ScriptedBackend, whole_app, write_model_dir


@pytest.fixture
async def client(backend: ScriptedBackend, encoder: PromptEncoder) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application of its own: one keeps what it has told for a moment."""
    transport = httpx.ASGITransport(whole_app(backend, encoder))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


HOSTILE = "<img src=x onerror=alert(1)>"
RESPONSE_ID = "cmpl-" + "a" * 32
ROW = LiveRequest(
    "i-1", RESPONSE_ID, 0, HOSTILE, "decode", 1.5, 12, 30, 100, 40.0, 70.0, 42, 2, 0.25, "", 1
)  # fmt: skip
VIEW = LiveView(
    (
        ReplicaLive(
            "0", 1, 3, 0, 42, 640, (MemoryPoint(0, 42), MemoryPoint(10, 52)), (ROW,),
            (EndedRequest(RESPONSE_ID, 0, "stop", 9, 11.0, 0.5),),
        ),
    ),
    num_unplaced=2,
)  # fmt: skip
HISTORY = SeriesReply(
    (1_700_000_000.12345, 1_700_000_001.0),
    (SeriesColumn("running", (1.0, None)), SeriesColumn("ttft_p50", (0.123456, 2.0))),
    (SeriesColumn(HOSTILE, (0.5, 0.25)),),
)


def trace(owner: bytes = b"") -> RequestTrace:
    decisions = pack_decisions([Decision("received", 1_700_000_000.0, {"prompt_tokens": 3, "max_new_tokens": 8})])
    return RequestTrace(f"{RESPONSE_ID}/i-1/ingress", "i-1", 0, owner, "ingress", 0, False, 0, decisions)


async def test_history(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.history = HISTORY
    reply = (await client.get("/live/series?step=second&after=3")).json()
    assert reply["at"] == [1_700_000_000.123, 1_700_000_001.0]
    assert reply["columns"] == {"running": [1.0, None], "ttft_p50": [0.1235, 2.0]}
    assert reply["tenants"] == {HOSTILE: [0.5, 0.25]}


async def test_history_that_cannot_be_read(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.history = FarsightError("the Supervisor does not answer")
    reply = await client.get("/live/series")
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "the Supervisor does not answer"


@pytest.mark.parametrize("address", ["/live/series?step=hour", "/live/series?after=-1", "/live/series?after=x"])
async def test_wrong_fields_are_refused(client: httpx.AsyncClient, address: str) -> None:
    assert (await client.get(address)).status_code == 400


TABLE = TableReply((5.0, 6.0), (TableRow(HOSTILE, (SeriesColumn("queue", (1.0, None)),)),), 3)


async def test_several_parts_in_one_answer(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.history, backend.on_replicas, backend.loads = HISTORY, VIEW, TABLE
    parts = ("status", "series", "requests", "placement", "replicas")
    reply = (await client.get(f"/live?parts={','.join(parts)}&after=3")).json()
    assert tuple(reply) == parts
    for part in ("status", "series", "requests", "replicas"):
        assert reply[part] == (await client.get(f"/live/{part}?after=3")).json()
    assert reply["placement"] == (await client.get("/placement")).json()
    assert reply["replicas"] == {"at": [5.0, 6.0], "rows": {HOSTILE: {"queue": [1.0, None]}}, "num_left_out": 3}


async def test_a_part_that_cannot_be_read_spares_the_others(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.history = FarsightError(f"away: {HOSTILE}")
    reply = (await client.get("/live?parts=series,status")).json()
    assert reply["series"]["error"]["message"] == f"away: {HOSTILE}"
    assert reply["status"]["actors"]


async def test_components_of_a_kind(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    event = LifeEvent(7.0, "router", "Router", "restarted", HOSTILE)
    backend.lives = ComponentsReply(TABLE, (event,))
    early, late = (pack_decisions([Decision("waits", at, {"reason": HOSTILE})]) for at in (1.0, 2.0))
    backend.decided = (RecentDecisions("a", early), RecentDecisions("b", late))
    reply = (await client.get("/live/components?kind=Router")).json()
    assert backend.kinds == ["Router"]
    assert reply["rows"] == {HOSTILE: {"queue": [1.0, None]}}
    assert reply["events"][0]["reason"] == HOSTILE
    assert [each["component"] for each in reply["decisions"]] == ["b", "a"]
    assert reply["decisions"][0]["text"] == "Waits behind other requests."
    assert (await client.get("/live/components")).status_code == 400
    assert (await client.get(f"/live/components?kind={'x' * 65}")).status_code == 400


@pytest.mark.parametrize("parts", ["", "status,", "nothing", "status,<script>", "x" * 300])
async def test_unknown_parts_are_refused(client: httpx.AsyncClient, parts: str) -> None:
    reply = await client.get("/live", params={"parts": parts})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "parts"


async def test_pages_share_one_reading(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    asked = [client.get("/live?parts=components&kind=Router&after=3") for _ in range(5)]
    assert len({reply.text for reply in await asyncio.gather(*asked)}) == 1
    assert backend.kinds == ["Router"]
    await client.get("/live?parts=components&kind=Scheduler&after=3")
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


async def test_requests_on_the_replicas(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.on_replicas = VIEW
    reply = (await client.get("/live/requests")).json()
    assert reply["num_unplaced"] == 2
    (replica,) = reply["replicas"]
    assert replica["curve"] == [{"steps": 0, "tokens": 42}, {"steps": 10, "tokens": 52}]
    assert replica["requests"][0]["tenant"] == HOSTILE
    assert replica["ended"][0]["predicted_len"] == 11.0


async def test_the_decisions_about_one(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.traces = [trace()]
    reply = (await client.get(f"/live/requests/{RESPONSE_ID}")).json()
    assert reply["choices"][0]["decisions"][0]["kind"] == "received"
    for unknown in ("cmpl-" + "b" * 32, "x", "..%2f", HOSTILE):
        assert (await client.get(f"/live/requests/{unknown}")).status_code == 404


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


def test_an_observer_sees_all_tenants_and_a_client_none(tmp_path: Path) -> None:
    parts = ("/live/status", "/live/series", "/live/requests", "/live/replicas", "/live/components?kind=Router")
    addresses = (*parts, "/live?parts=status,components&kind=Router", f"/live/requests/{RESPONSE_ID}")
    with guarded_server(tmp_path, PromptEncoder(write_model_dir(tmp_path / "model"))) as server:
        server.backend.traces, server.backend.on_replicas = [trace(b"another tenant's")], VIEW
        with httpx.Client(base_url=server.base_url) as http:
            for address in addresses:
                assert http.get(address).status_code == 401
                assert http.get(address, headers=server.bearer("serve")).status_code == 403
                assert http.get(address, headers=server.bearer("observe")).status_code == 200
            own = f"/v1/requests/{RESPONSE_ID}"  # a client's own way to its decisions stays as narrow as it was
            assert http.get(own, headers=server.bearer("serve")).status_code == 404
            for page in ("/dashboard/requests", "/dashboard/scheduler", "/dashboard/forecasts", "/play"):
                assert http.get(page).status_code == 200
