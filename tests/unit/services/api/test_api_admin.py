"""``POST /admin/scale``, ``/admin/drain`` and ``/admin/upgrade``: who may, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from farsight.core.errors import FarsightError, MessageError
from farsight.services.api.admin import Administration
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import Client, ScriptedBackend, application, client_on

TOKEN = "s3cret"
BODY = {"kind": "replica", "count": 3}
ORDERS: dict[str, Any] = {"scale": BODY, "drain": {"replica": "0"}, "upgrade": {"model": "/m"}}


class ThroughRay(MessageError):
    """As Ray hands on an error from an actor: an instance of its class, whose text is a traceback."""

    def __str__(self) -> str:
        return "Traceback (most recent call last): ..."


@pytest.fixture
def administration(request: pytest.FixtureRequest) -> Administration:
    return getattr(request, "param", Administration(TOKEN))


@pytest.fixture
def http(backend: ScriptedBackend, encoder: PromptEncoder, administration: Administration) -> Client:
    return client_on(application(backend, encoder, administration=administration))


async def post(http: Client, path: str, body: Any, authorization: str = f"Bearer {TOKEN}") -> httpx.Response:
    return await http.post(f"/admin/{path}", json=body, headers={"Authorization": authorization})


async def test_the_new_counts_come_back(http: Client, backend: ScriptedBackend) -> None:
    reply = await post(http, "scale", BODY)
    assert (reply.status_code, backend.scaled) == (200, [("replica", 3)])
    counts = {"replicas": 3, "length_predictors": 1, "serving_time_estimators": 1, "image_encoders": 0}
    assert reply.json() == {**counts, "ingress_replicas": None}


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN])
@pytest.mark.parametrize(("path", "body"), ORDERS.items())
async def test_without_the_token_nothing_is_done(
    http: Client, backend: ScriptedBackend, path: str, body: Any, given: str
) -> None:
    for reply in (await post(http, path, body, given), await http.post(f"/admin/{path}", json={"kind": 5})):
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_admin_token")
        assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert not backend.scaled


@pytest.mark.parametrize("administration", [Administration()], indirect=True)
async def test_a_service_without_a_token_says_how_to_get_one(http: Client) -> None:
    reply = await post(http, "scale", BODY, "Bearer ")
    assert reply.status_code == 403 and "FARSIGHT_ADMIN_TOKEN" in reply.json()["error"]["message"]


@pytest.mark.parametrize("administration", [Administration(TOKEN, scales_ingress=False)], indirect=True)
async def test_ingress_replicas_that_nobody_would_add_are_refused(http: Client, backend: ScriptedBackend) -> None:
    reply = await post(http, "scale", BODY | {"kind": "ingress"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "kind")
    assert not backend.scaled


LONG = {"replica": "x" * 100_000}
WRONG: list[tuple[str, Any, str | None, str]] = [
    ("scale", BODY | {"count": 0}, "count", "got 0, expected an integer from 1 to 1000"),
    ("scale", BODY | {"count": 10**30}, "count", "expected an integer from 1 to 1000"),
    ("scale", BODY | {"count": True}, "count", "expected an integer from 1 to 1000"),
    ("scale", BODY | {"kind": None}, "kind", "expected the name of a kind"),
    ("scale", BODY | {"number": 2}, "number", "unknown field"),
    ("drain", {}, "replica", ""),
    ("drain", {"replica": 0}, "replica", ""),
    ("drain", {"replica": "x" * 101}, "replica", ""),
    ("drain", {"replica": "0", "cancel": "no"}, "cancel", ""),
    ("drain", {"replica": "0", "all": True}, "all", ""),
    ("drain", [], None, ""),
    ("drain", LONG, None, ""),
    ("upgrade", {"model": ""}, "model", ""),
    ("upgrade", {"model": "/" * 4097}, "model", ""),
    ("upgrade", {"model": "/m\0"}, "model", r"got '/m\x00', expected the absolute path of a model"),
    ("upgrade", {"model": ["/m"]}, "model", ""),
    ("upgrade", {"model": "/m", "config": ["engine"]}, "config", ""),
    ("upgrade", {"model": "/m", "drain_s": -1}, "drain_s", ""),
    ("upgrade", {"model": "/m", "drain_s": 1e30}, "drain_s", ""),
    ("upgrade", {"model": "/m", "drain_s": "600"}, "drain_s", ""),
    ("upgrade", {"model": "/m", "surge": 1}, "surge", ""),
    ("upgrade", {"model": "/m", "weights": "/m"}, "weights", ""),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), WRONG)
async def test_a_wrong_field_is_named_and_nothing_is_done(
    http: Client, backend: ScriptedBackend, path: str, body: Any, param: str | None, words: str
) -> None:
    reply = await post(http, path, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (413 if body is LONG else 400, param), reply.text
    assert words in error["message"] and error.keys() == {"message", "type", "param", "code"}
    assert not backend.scaled


@pytest.mark.parametrize("path", ["scale", "drain"])
async def test_what_the_supervisor_refuses_is_a_400_without_a_traceback(
    http: Client, backend: ScriptedBackend, path: str
) -> None:
    backend.scale_error = ThroughRay("kind", "wizard", "one of replica, ingress")
    reply = await post(http, path, ORDERS[path])
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "kind")
    assert error["message"] == "kind: got 'wizard', expected one of replica, ingress"


async def test_what_cannot_be_done_now_is_a_503(http: Client, backend: ScriptedBackend) -> None:
    backend.scale_error = FarsightError("worker-1 died while it started")
    reply = await post(http, "scale", BODY)
    assert reply.status_code == 503 and "worker-1 died" in reply.json()["error"]["message"]


async def test_a_replica_is_taken_out_and_back(http: Client, backend: ScriptedBackend) -> None:
    assert (await post(http, "drain", {"replica": "0"})).json() == {"replica": "0", "drained": True}
    assert (await post(http, "drain", {"replica": "0", "cancel": True})).json() == {"replica": "0", "drained": False}
    assert backend.scaled == [("0", 1), ("0", 0)]


async def test_new_weights_and_settings_are_passed_on(http: Client, backend: ScriptedBackend) -> None:
    named = await post(http, "upgrade", {"model": "/m", "surge": False})
    assert named.json() == {"version": 1, "model": "/m"}
    config = {"engine": {"kv_memory": "64MiB"}}
    assert (await post(http, "upgrade", {"config": config})).status_code == 200
    assert backend.scaled == [("/m", 0), (json.dumps(config), 1)]
