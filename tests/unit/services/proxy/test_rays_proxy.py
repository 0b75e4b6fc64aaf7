"""Ray Serve's own proxy: its errors, and the address of its server for calls between deployments."""

from __future__ import annotations

import importlib
from types import ModuleType

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.proxy.loopback import keep_on_loopback
from services.proxy.proxy_errors import OpenAIErrors, middlewares


def answering(response: Response) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await response(scope, receive, send)

    return OpenAIErrors(app)


async def get(app: ASGIApp, path: str = "/v1/models") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        return await client.get(path)


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [(500, 503, "unavailable"), (503, 503, "unavailable"), (404, 503, "unavailable"), (408, 408, "request_timeout")],
)
async def test_plain_text_becomes_an_error_of_the_api_with_an_honest_status(status: int, told: int, code: str) -> None:
    """Ray's proxy says 500 where a replica died, and 404 where none has started."""
    reply = await get(answering(PlainTextResponse("Internal Server Error", status)))
    assert (reply.status_code, reply.headers.get("retry-after")) == (told, "1" if told == 503 else None)
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("the replica died")


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    pass


@pytest.mark.parametrize("app", [broken, silent])
async def test_what_the_proxy_raises_or_does_not_answer_becomes_one_as_well(app: ASGIApp) -> None:
    reply = await get(OpenAIErrors(app))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")


async def test_a_failure_in_the_middle_of_an_answer_ends_the_connection() -> None:
    async def ends_early(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await broken(scope, receive, send)

    with pytest.raises(RuntimeError, match="the replica died"):
        await get(OpenAIErrors(ends_early))


async def test_all_else_passes_as_it_is() -> None:
    ours = {"error": {"message": "ours"}}
    assert (await get(answering(JSONResponse(ours, 503)))).json() == ours
    assert (await get(answering(PlainTextResponse("metrics")))).text == "metrics"
    assert (await get(answering(PlainTextResponse("draining", 503)), "/-/healthz")).text == "draining"


def test_ray_finds_it_where_its_environment_says() -> None:
    module, _, name = "services.proxy.proxy_errors.middlewares".rpartition(".")
    assert [each.cls for each in getattr(importlib.import_module(module), name)()] == [OpenAIErrors]
    assert len(middlewares()) == 1


def test_the_server_is_bound_to_the_loopback_interface_whatever_ray_asks_for() -> None:
    module, bound = ModuleType("replica"), []

    def bind(server: object, address: str) -> int:
        bound.append((server, address))
        return 4321

    module.add_port_to_grpc_server = bind  # type: ignore[attr-defined]
    keep_on_loopback(module)
    assert module.add_port_to_grpc_server("a server", "[::]:0") == 4321
    assert bound == [("a server", "127.0.0.1:0")]


def test_a_ray_that_binds_it_otherwise_is_noticed() -> None:
    with pytest.raises(AttributeError, match="add_port_to_grpc_server"):
        keep_on_loopback(ModuleType("replica"))
