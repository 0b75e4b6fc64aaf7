"""``POST /admin/scale``, ``/admin/drain`` and ``/admin/upgrade``: who may, and what comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from core.errors import FarsightError, MessageError
from services.api.admin import Administration
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import ScriptedBackend, application

TOKEN = "s3cret"
BODY = {"kind": "replica", "count": 3}


class ThroughRay(MessageError):
    """As Ray hands on an error from an actor: an instance of its class, whose text is a traceback."""

    def __str__(self) -> str:
        return "Traceback (most recent call last): ..."


@pytest.fixture
def administration(request: pytest.FixtureRequest) -> Administration:
    return getattr(request, "param", Administration(TOKEN))


@pytest.fixture
async def http(
    backend: ScriptedBackend, encoder: PromptEncoder, administration: Administration
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application(backend, encoder, administration=administration))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def post(http: httpx.AsyncClient, authorization: str | None = f"Bearer {TOKEN}", **change: Any) -> httpx.Response:
    headers = {} if authorization is None else {"Authorization": authorization}
    return await http.post("/admin/scale", json=BODY | change, headers=headers)


async def test_the_new_counts_come_back(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    reply = await post(http)
    assert (reply.status_code, backend.scaled) == (200, [("replica", 3)])
    assert reply.json() == {
        "replicas": 3,
        "length_predictors": 1,
        "serving_time_estimators": 1,
        "image_encoders": 0,
        "ingress_replicas": None,
    }


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN])
async def test_without_the_token_nothing_is_done(
    http: httpx.AsyncClient, backend: ScriptedBackend, given: str | None
) -> None:
    reply = await post(http, given, kind=5)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_admin_token")
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert not backend.scaled


@pytest.mark.parametrize("administration", [Administration()], indirect=True)
async def test_a_service_without_a_token_says_how_to_get_one(http: httpx.AsyncClient) -> None:
    reply = await post(http, "Bearer ")
    assert reply.status_code == 403
    assert "FARSIGHT_ADMIN_TOKEN" in reply.json()["error"]["message"]


@pytest.mark.parametrize("administration", [Administration(TOKEN, scales_ingress=False)], indirect=True)
async def test_ingress_replicas_that_nobody_would_add_are_refused(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    reply = await post(http, kind="ingress")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "kind")
    assert not backend.scaled


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"count": 0}, "count", "got 0, expected an integer from 1 to 1000"),
        ({"count": 10**30}, "count", "expected an integer from 1 to 1000"),
        ({"count": True}, "count", "expected an integer from 1 to 1000"),
        ({"kind": None}, "kind", "expected the name of a kind"),
        ({"number": 2}, "number", "unknown field"),
    ],
)
async def test_a_wrong_field_is_named(http: httpx.AsyncClient, change: dict[str, Any], param: str, words: str) -> None:
    reply = await post(http, **change)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert words in reply.json()["error"]["message"]


async def test_what_the_supervisor_refuses_is_a_400_without_a_traceback(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.scale_error = ThroughRay("kind", "wizard", "one of replica, ingress")
    reply = await post(http)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "kind")
    assert error["message"] == "kind: got 'wizard', expected one of replica, ingress"


async def test_what_cannot_be_done_now_is_a_503(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.scale_error = FarsightError("worker-1 died while it started")
    reply = await post(http)
    assert reply.status_code == 503
    assert "worker-1 died" in reply.json()["error"]["message"]


async def drain(http: httpx.AsyncClient, body: object, authorization: str = f"Bearer {TOKEN}") -> httpx.Response:
    return await http.post("/admin/drain", json=body, headers={"Authorization": authorization})


async def test_a_replica_is_taken_out_and_back(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert (await drain(http, {"replica": "0"})).json() == {"replica": "0", "drained": True}
    assert (await drain(http, {"replica": "0", "cancel": True})).json() == {"replica": "0", "drained": False}
    assert backend.scaled == [("0", 1), ("0", 0)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"replica": 0}, 400),
        ({"replica": "x" * 101}, 400),
        ({"replica": None}, 400),
        ({"replica": "0", "cancel": "no"}, 400),
        ({"replica": "0", "all": True}, 400),
        ([], 400),
        ({"replica": "x" * 100_000}, 413),
    ],
)
async def test_a_wrong_order_to_drain_does_nothing(
    http: httpx.AsyncClient, backend: ScriptedBackend, body: object, status: int
) -> None:
    reply = await drain(http, body)
    assert (reply.status_code, set(reply.json()["error"])) == (status, {"message", "type", "param", "code"})
    assert not backend.scaled


@pytest.mark.parametrize("given", ["", "Bearer wrong", f"Basic {TOKEN}"])
async def test_without_the_token_nothing_is_drained(
    http: httpx.AsyncClient, backend: ScriptedBackend, given: str
) -> None:
    assert (await drain(http, {"replica": "0"}, given)).status_code == 401
    assert not backend.scaled


async def test_a_replica_that_must_stay_is_named(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.scale_error = ThroughRay("replica", "0", "one of several")
    reply = await drain(http, {"replica": "0"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "replica")


async def upgrade(http: httpx.AsyncClient, body: object, authorization: str = f"Bearer {TOKEN}") -> httpx.Response:
    return await http.post("/admin/upgrade", json=body, headers={"Authorization": authorization})


async def test_new_weights_are_named(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert (await upgrade(http, {"model": "/m", "surge": False})).json() == {"version": 1, "model": "/m"}
    assert backend.scaled == [("/m", 0)]


async def test_settings_are_passed_on(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    config = {"engine": {"kv_memory": "64MiB"}}
    assert (await upgrade(http, {"config": config})).status_code == 200
    assert backend.scaled == [(json.dumps(config), 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"model": "/" * 4097},
        {"model": ["/m"]},
        {"config": ["engine"]},
        {"model": "/m\x00", "drain_s": -1},
        {"drain_s": 1e30},
        {"drain_s": "600"},
        {"surge": 1},
        {"weights": "/m"},
    ],
)
async def test_a_wrong_order_to_upgrade_does_nothing(
    http: httpx.AsyncClient, backend: ScriptedBackend, change: dict[str, object]
) -> None:
    reply = await upgrade(http, {"model": "/m"} | change)
    assert (reply.status_code, set(reply.json()["error"])) == (400, {"message", "type", "param", "code"})
    assert not backend.scaled


async def test_without_the_token_no_weights_change(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert (await upgrade(http, {"model": "/m"}, "Bearer wrong")).status_code == 401
    assert not backend.scaled
