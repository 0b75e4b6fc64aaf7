"""Hostile requests over real HTTP: nothing comes in without the right key, and everything refused says why."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from farsight.core.config.server import AccessConfig
from farsight.core.request import FLEX
from farsight.services.api.access.access_control import (
    MAX_ADDRESSES,
    MAX_SLOWED,
    SLOW_S,
    AccessControl,
    AccessSettings,
    Failures,
    access_settings,
)
from farsight.services.api.access.gate import route_paths
from farsight.services.api.access.key_file import KeyFile, changed_key_file
from farsight.services.api.access.keys import Role, Tenant
from farsight.services.api.access.roles import ROLES, Everyone, RouteRoles
from farsight.services.api.bodies import LARGE_BODY_BYTES
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.access.access_support import (
    ADMIN_TOKEN,
    BODY,
    LONG_S,
    GuardedServer,
    add_key,
    guarded_server,
)
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, client_on, delta, whole_app
from tests.unit.services.api.test_api_explain import trace_of

POSTS = {"/v1/completions", "/v1/chat/completions", "/admin/scale", "/admin/drain", "/admin/upgrade"}
POSTS |= {"/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"}
POSTS |= {"/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel", "/v1/responses/{response_id}/cancel"}
POSTS |= {path for path in ROLES if path.startswith("/api/")} - {"/api/tags", "/api/ps", "/api/version"}
EXAMPLES = {"{model_id:path}": MODEL, "{response_id}": "cmpl-" + "0" * 32, "{stream_id}": "0" * 32}
EXAMPLES |= {"{file_id}": "file-0", "{batch_id}": "batch_0", "{digest}": "sha256:0"}


INSIDE = (b"worker-0", b'"pid"', b'"kv"', b'"queue_delay_s"', b'"actors"')  # told by /status to operators


def example(path: str) -> str:
    for name, value in EXAMPLES.items():
        path = path.replace(name, value)
    assert "{" not in path, f"an example is missing for {path}"
    return path


def check_error(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    if reply.request.url.path.startswith("/api/"):  # Ollama's shape
        shown: dict[str, Any] = reply.json()
        assert isinstance(shown["error"], str) and shown["code"] == code
        return shown
    error: dict[str, Any] = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == code
    return error


def test_every_route_has_a_declared_role(guarded: GuardedServer) -> None:
    """A new route without a line in ``ROLES`` fails here; until it has one, it asks for ``admin``."""
    paths = set(route_paths(guarded.app))
    assert paths == set(ROLES), "declare the role of each route in services/api/access/roles.py, and of no other"
    assert RouteRoles(["/new"]).of({"type": "http", "path": "/new"}) is Role.ADMIN


@pytest.mark.parametrize("path", sorted(ROLES))
def test_each_route_asks_for_its_role(guarded: GuardedServer, http: httpx.Client, path: str) -> None:
    method, address, access = "POST" if path in POSTS else "GET", example(path), ROLES[path]
    for name in (None, "serve", "observe", "admin"):
        headers = {} if name is None else guarded.bearer(name)
        reply = http.request(method, address, headers=headers, json={} if method == "POST" else None)
        if path == "/status":
            assert {word in reply.content for word in INSIDE} == {name in ("observe", "admin")}, reply.text
        if access is Everyone.PUBLIC:
            assert reply.status_code == 200
        elif name is None:
            check_error(reply, 401, "missing_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
        elif access in (Everyone.ANY_KEY, name) or name == "admin":
            assert reply.status_code not in (401, 403), reply.text
        else:
            check_error(reply, 403, "insufficient_role")


WRONG = ["fsk-000000000000-" + "A" * 43, "x", "-", "fsk--", "null", "Bearer", "t" * 63, "a" * 600]


@pytest.mark.parametrize("path", sorted(path for path, access in ROLES.items() if access is not Everyone.PUBLIC))
def test_no_wrong_key_opens_a_route(guarded: GuardedServer, http: httpx.Client, path: str) -> None:
    method = "POST" if path in POSTS else "GET"
    guarded.clock.seconds += 600
    for wrong in WRONG:
        for headers in ({"Authorization": f"Bearer {wrong}"}, {"x-api-key": wrong}):
            reply = http.request(method, example(path), headers=headers, json={} if method == "POST" else None)
            assert reply.status_code == 401, (wrong, reply.text)
    for header in (f"Basic {guarded.keys['admin']}", guarded.keys["admin"], f"Bearer{guarded.keys['admin']}"):
        assert http.request(method, example(path), headers={"Authorization": header}).status_code == 401


def test_both_headers_count_alike(guarded: GuardedServer, http: httpx.Client) -> None:
    for headers in ({"x-api-key": guarded.keys["serve"]}, {"Authorization": f"bEaReR  {guarded.keys['serve']}"}):
        assert http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    both = guarded.bearer("serve") | {"x-api-key": guarded.keys["serve"]}
    assert http.get("/v1/models", headers=both).status_code == 200
    assert http.get("/status", headers={"x-api-key": ADMIN_TOKEN}).status_code == 200


def test_two_keys_that_differ_are_refused_in_any_order(guarded: GuardedServer, http: httpx.Client) -> None:
    bearer, again = (("authorization", f"Bearer {guarded.keys[name]}") for name in ("serve", "admin"))
    plain = ("x-api-key", guarded.keys["admin"])
    for headers in ([bearer, plain], [plain, bearer], [bearer, again], [again, bearer]):
        check_error(http.get("/status", headers=headers), 401, "conflicting_api_keys")


TRICKS = [
    *("/status%0a", "/status%0A?x", "/%73tatus", "/STATUS", "//status", "/status/", "/./status", "/x/../status"),
    *("/v1/models/../../status", "/v1/models/..%2f..%2fstatus", "/health/../status", "/dashboard/../metrics"),
    *("/metrics%0a", "/metrics;x", "/admin/scale%0a", "/health%00/../status", "/status%00", "/docs/../status"),
    *("/v1/models/%2e%2e/%2e%2e/admin/scale", "/placement%0a", "/placement#x", "/-/healthz", "/-/routes", "/status"),
]


@pytest.mark.parametrize("path", TRICKS)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "DELETE", "TRACE", "get"])
def test_no_trick_with_paths_shows_what_a_role_protects(guarded: GuardedServer, method: str, path: str) -> None:
    """Raw bytes, since clients tidy paths. Without a key only public pages; ``serve`` shows nothing of operators."""
    for key in ("", guarded.keys["serve"]):
        status, body = raw(guarded.port, f"{method} {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n")
        assert status in (400, 401, 403, 404, 405), (key[:3], status, body)
        assert not any(word in body for word in (*INSIDE, b"farsight:", b"ingress_replicas")), body
    assert guarded.backend.scaled == []


SMUGGLED = [
    "Authorization: Bearer {serve}\r\n x-api-key: {admin}",
    "X-Api-Key : {admin}",
    "x_api_key: {admin}",
    "x-api-key: {serve}\r\nx-api-key: {admin}",
    "Content-Length: 5\r\nTransfer-Encoding: chunked\r\nx-api-key: {serve}",
    "Content-Length: 5\r\nContent-Length: 6\r\nx-api-key: {serve}",
    "x-farsight-caller: admin\r\nfarsight.caller: admin\r\nx-forwarded-user: admin",
    "X-Farsight-Client: 127.0.0.1\r\nX-Forwarded-For: 127.0.0.1",
    "Authorization: Bearer {serve}, Bearer {admin}",
    "Authorization: Bearer {admin}\0",
    "Cookie: farsight-key={admin}",
]


@pytest.mark.parametrize("headers", SMUGGLED)
def test_no_trick_with_headers_gives_a_role(guarded: GuardedServer, headers: str) -> None:
    status, body = raw(guarded.port, f"GET /status HTTP/1.1\r\nHost: x\r\n{headers.format(**guarded.keys)}\r\n")
    assert status in (0, 400, 401, 403), body  # 0: closed without an answer
    assert b'"actors"' not in body
    address = f"/status?api_key={guarded.keys['admin']}&key={guarded.keys['admin']}"
    assert raw(guarded.port, f"GET {address} HTTP/1.1\r\nHost: x\r\n")[0] == 401


def test_a_second_request_in_the_body_is_no_request(guarded: GuardedServer) -> None:
    inner = f"GET /status HTTP/1.1\r\nHost: x\r\nx-api-key: {guarded.keys['admin']}\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(inner)}\r\n"
    status, body = raw(guarded.port, head, inner)
    assert status == 401 and b'"actors"' not in body


@pytest.mark.parametrize("size", [10_000, 70_000, 1_000_000])
def test_huge_headers_do_no_harm(guarded: GuardedServer, http: httpx.Client, size: int) -> None:
    for header in (f"x-api-key: {'a' * size}", "\r\n".join(f"h{n}: v" for n in range(size // 10))):
        status, _ = raw(guarded.port, f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{header}\r\n")
        assert status in (0, 400, 401, 431)
    assert http.get("/health").status_code == 200


def raw(port: int, head: str, body: str = "") -> tuple[int, bytes]:
    """Status (0 without an answer) and all bytes of the answers to one connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), LONG_S) as connection:
        try:
            connection.sendall(f"{head}Connection: close\r\n\r\n{body}".encode("latin-1"))
            while data := connection.recv(65536):
                received += data
        except ConnectionError:
            pass
    return (int(received.split()[1]) if received.startswith(b"HTTP/1.1 ") else 0), received


def test_refusals_do_not_wait_for_the_body(guarded: GuardedServer) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), LONG_S) as connection:
        connection.sendall(f"{head}\r\n".encode())
        assert b"401 Unauthorized" in connection.recv(65536)


def test_revoked_and_new_keys_count_within_a_second(guarded: GuardedServer, http: httpx.Client) -> None:
    headers = {"x-api-key": add_key(guarded.key_file, "short-lived")}
    guarded.clock.seconds += 1
    assert http.get("/v1/models", headers=headers).status_code == 200
    with changed_key_file(guarded.key_file) as content:
        kept = tuple(each for each in content[0].keys if each.name != "short-lived")
        content[0] = KeyFile(kept, content[0].tenants)
    guarded.clock.seconds += 1
    check_error(http.get("/v1/models", headers=headers), 401, "invalid_api_key")


def test_a_broken_file_changes_nothing(guarded: GuardedServer, http: httpx.Client) -> None:
    good = guarded.key_file.read_bytes()
    try:
        for break_it in (lambda path: path.write_bytes(b"{"), lambda path: path.chmod(0o644), Path.unlink):
            break_it(guarded.key_file)
            guarded.clock.seconds += 1
            assert http.get("/v1/models", headers=guarded.bearer("serve")).status_code == 200
            assert http.get("/v1/models").status_code == 401
    finally:
        guarded.key_file.unlink(missing_ok=True)
        guarded.key_file.touch(0o600)
        guarded.key_file.write_bytes(good)
    assert guarded.registry.get_sample_value("farsight:failed_key_reloads") == 3


def test_limits_are_refused_in_openais_form(guarded: GuardedServer, http: httpx.Client) -> None:
    key = add_key(guarded.key_file, "limited", tenant=Tenant("limited", requests_per_minute=3, tokens_per_minute=900))
    headers = {"x-api-key": key}
    guarded.clock.seconds += 1
    for left in (2, 1, 0):
        reply = http.post("/v1/completions", json=BODY, headers=headers)
        assert reply.status_code == 200
        assert reply.headers["x-ratelimit-limit-requests"] == "3"
        assert reply.headers["x-ratelimit-remaining-requests"] == str(left)
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) <= 900
        assert reply.headers["x-ratelimit-reset-requests"] == f"{20 * (3 - left):.3f}s"
    reply = http.post("/v1/completions", json=BODY, headers=headers)
    error = check_error(reply, 429, "rate_limit_exceeded")
    assert error["type"] == "rate_limit_error"
    assert "limit of 3 requests a minute; retry in 20 s" in error["message"]
    assert reply.headers["retry-after"] == "20"
    assert http.get("/v1/models", headers=headers).status_code == 200  # asking for the model is no work
    guarded.clock.seconds += 20
    assert http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    labels = {"tenant": "limited", "limit": "requests"}
    assert guarded.registry.get_sample_value("farsight:tenant_rejected_total", labels) == 1


def test_requests_in_flight_are_counted_until_they_end(guarded: GuardedServer, http: httpx.Client) -> None:
    headers = {"x-api-key": add_key(guarded.key_file, "narrow", tenant=Tenant("narrow", max_in_flight=1))}
    guarded.clock.seconds += 1
    guarded.backend.script = (delta("a"), LONG_S, delta("b", "stop"))
    try:
        with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers=headers) as reply:
            lines = reply.iter_lines()  # kept: its end would close the connection
            assert next(lines).startswith("data:")
            refused = http.post("/v1/completions", json=BODY, headers=headers)
            assert "1 requests in flight" in check_error(refused, 429, "rate_limit_exceeded")["message"]
    finally:
        guarded.backend.script = ScriptedBackend().script
    deadline = time.monotonic() + LONG_S
    while http.post("/v1/completions", json=BODY, headers=headers).status_code != 200:  # until the server has noticed
        assert time.monotonic() < deadline


def test_requests_in_flight_are_counted_by_the_name_of_the_tenant(guarded: GuardedServer, http: httpx.Client) -> None:
    """Also those whose body is so large that another process reads it."""
    del guarded.backend.keys[:], guarded.backend.salts[:]
    small = json.dumps(BODY)
    for name in ("acme-1", "acme-2", "serve"):
        for content in (small, small + " " * LARGE_BODY_BYTES):
            headers = guarded.bearer(name) | {"Content-Type": "application/json"}
            assert http.post("/v1/completions", content=content, headers=headers).status_code == 200
    assert guarded.backend.keys == ["acme"] * 4 + ["serve"] * 2
    assert len(set(guarded.backend.salts)) == 2


def test_a_tenant_is_in_the_salt_and_in_the_owner(guarded: GuardedServer, http: httpx.Client) -> None:
    backend = guarded.backend
    del backend.salts[:], backend.origins[:], backend.priorities[:]
    for name, salt in (("acme-1", None), ("acme-2", None), ("serve", None), ("acme-1", "s"), ("serve", "s")):
        body = BODY | {"priority": 2} | ({} if salt is None else {"cache_salt": salt})
        assert http.post("/v1/completions", json=body, headers=guarded.bearer(name)).status_code == 200
    first, second, other, salted, other_salted = backend.salts
    assert first == second
    assert len({first, other, salted, other_salted}) == 4
    assert backend.priorities == [5, 5, 2, 5, 2]  # acme goes no further up than 5
    for name in ("acme-1", "serve"):
        body = BODY | {"prompt_cache_key": "s"}
        assert http.post("/v1/completions", json=body, headers=guarded.bearer(name)).status_code == 200
    assert len({*backend.salts}) == 6, "a key divides a tenant and joins none"
    del backend.origins[5:]
    backend.traces = [trace_of(origin, "ingress") for origin in backend.origins if origin is not None]
    address = f"/v1/requests/{backend.traces[0].trace_id.partition('/')[0]}"
    codes = {name: http.get(address, headers=guarded.bearer(name)).status_code for name in guarded.keys}
    assert codes == {"acme-1": 200, "acme-2": 200, "serve": 404, "observe": 404, "admin": 200}


def test_a_tenant_that_may_not_go_first_is_told_so(guarded: GuardedServer, http: httpx.Client) -> None:
    backend = guarded.backend
    del backend.priorities[:]
    served = [
        http.post("/v1/completions", json=BODY | {"service_tier": tier}, headers=guarded.bearer(name)).json()
        for name in ("acme-1", "serve")
        for tier in ("priority", "flex")
    ]
    assert [answer["service_tier"] for answer in served] == ["default", "flex", "priority", "flex"]
    assert backend.priorities == [5, FLEX + 5, -1, FLEX]


def test_usage_is_told_to_its_tenant(guarded: GuardedServer, http: httpx.Client) -> None:
    headers = {"x-api-key": add_key(guarded.key_file, "counted")}
    guarded.clock.seconds += 1
    used = http.post("/v1/completions", json=BODY, headers=headers).json()["usage"]
    (row,) = http.get("/v1/usage", headers=headers).json()["data"]
    assert row["gpu_seconds"] == used["gpu_seconds"]
    assert (row["tenant"], row["requests"], row["in_flight"]) == ("counted", 1, 0)
    assert (row["prompt_tokens"], row["output_tokens"]) == (used["prompt_tokens"], used["completion_tokens"])
    every_row = http.get("/v1/usage", headers=guarded.bearer("observe")).json()["data"]
    assert row in every_row and len(every_row) > 1
    labels = {"tenant": "counted", "kind": "output"}
    assert guarded.registry.get_sample_value("farsight:tenant_tokens_total", labels) == used["completion_tokens"]


def test_an_admin_key_scales_as_the_admin_token_does(guarded: GuardedServer, http: httpx.Client) -> None:
    try:
        for headers in (guarded.bearer("admin"), {"Authorization": f"Bearer {ADMIN_TOKEN}"}):
            assert http.post("/admin/scale", json={"kind": "replica", "count": 2}, headers=headers).status_code == 200
        assert guarded.backend.scaled == [("replica", 2)] * 2
    finally:
        guarded.backend.scaled.clear()


def test_pages_allow_only_their_own_scripts(http: httpx.Client) -> None:
    for path in ("/dashboard", "/dashboard/placement", "/docs"):
        reply = http.get(path)
        policy = reply.headers["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy and "http" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert " onclick" not in reply.text and " style=" not in reply.text and "javascript:" not in reply.text


def test_hundreds_of_wrong_keys_are_slowed_and_right_ones_are_not(tmp_path: Path, encoder: PromptEncoder) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(guarded_server(tmp_path, encoder, failures_per_minute=50))
        limits = httpx.Limits(max_connections=70)
        http = stack.enter_context(httpx.Client(base_url=server.base_url, timeout=LONG_S, limits=limits))
        wrong = [{"x-api-key": f"fsk-{number:012x}-{'A' * 43}"} for number in range(250)]
        with concurrent.futures.ThreadPoolExecutor(70) as pool:
            replies = list(pool.map(lambda headers: http.get("/v1/models", headers=headers), wrong))
        codes = [reply.status_code for reply in replies]
        assert (codes.count(401), codes.count(429)) == (50, 200)
        late = next(reply for reply in replies if reply.status_code == 429)
        check_error(late, 429, "too_many_wrong_api_keys")
        assert int(late.headers["retry-after"]) >= 1
        assert http.get("/v1/models", headers=server.bearer("serve")).status_code == 200
        assert server.registry.get_sample_value("farsight:failed_keys_total", {"reason": "wrong"}) == 250
        assert (len(server.access.failures), server.access.failures.num_slowed) == (1, 0)


async def test_only_so_many_answers_are_held_back_at_once(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[float] = []
    access = AccessControl(AccessSettings(api_key="k" * 32, failures_per_minute=1), now=lambda: 0.0)
    client = open_client(encoder, access)

    async def hold(seconds: float) -> None:
        held.append(seconds)
        assert access.failures.num_slowed == 1

    with monkeypatch.context() as patched:
        # Not `asyncio.sleep` itself: the server of other tests sleeps in a thread of this process.
        patched.setattr("farsight.services.api.access.gate.asyncio", SimpleNamespace(sleep=hold))
        codes = [(await client.get("/v1/models", headers={"x-api-key": "x"})).status_code for _ in range(3)]
        assert (codes, held) == ([401, 429, 429], [SLOW_S, SLOW_S])
        access.failures.num_slowed = MAX_SLOWED
        assert (await client.get("/v1/models", headers={"x-api-key": "x"})).status_code == 429
        assert len(held) == 2
        assert (await client.get("/v1/models", headers={"x-api-key": "k" * 32})).status_code == 200


def test_failures_are_kept_in_bounded_memory() -> None:
    failures = Failures(2)
    for number in range(3 * MAX_ADDRESSES):
        failures.add(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0)
    assert len(failures) == MAX_ADDRESSES
    waits = [failures.add(f"2001:db8:0:1::{number:x}", 0.0) for number in range(100)]
    assert waits[:2] == [0.0, 0.0] and waits[2] > 0  # one network
    assert failures.add("2001:db8:0:1::1", 120.0) == 0.0
    assert failures.add("x" * 10_000, 0.0) == 0.0
    assert MAX_SLOWED < 1000


def open_client(encoder: PromptEncoder, access: AccessControl | None = None, **settings: Any) -> httpx.AsyncClient:
    app = whole_app(ScriptedBackend(), encoder, access=access or AccessControl(AccessSettings(**settings)))
    return client_on(app, host="localhost")


ALLOWED = ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "localhost.", "a.api.example.org")
OTHERS = ("evil.example.org", "localhost.evil.example.org", "127.0.0.1.evil.example.org:8000", "", "api.example.org")


async def test_a_name_that_is_not_allowed_is_refused(encoder: PromptEncoder) -> None:
    client = open_client(encoder, hosts=("localhost", "127.0.0.1", "[::1]", "*.api.example.org"))
    for host in (*ALLOWED, *OTHERS, "xapi.example.org"):
        for path in ("/v1/models", "/health", "/dashboard"):
            reply = await client.get(path, headers={"host": host})
            assert reply.status_code == (200 if host in ALLOWED else 403), host


@pytest.mark.parametrize(
    ("access", "environment", "host", "hosts"),
    [
        ({}, {}, "127.0.0.2", ("localhost", "127.0.0.1", "[::1]", "127.0.0.2")),
        ({}, {}, "", ()),
        ({}, {"FARSIGHT_API_KEY": "k" * 32}, "127.0.0.1", ()),
        ({"key_file": "keys.json"}, {}, "127.0.0.1", ()),
        ({"allowed_hosts": "A.example.org, *.b"}, {"FARSIGHT_API_KEY": "k" * 32}, "", ("a.example.org", "*.b")),
        ({"allowed_hosts": "*"}, {}, "127.0.0.1", ()),
    ],
)
def test_the_loopback_interface_without_keys_allows_its_own_names(
    access: dict[str, Any], environment: dict[str, str], host: str, hosts: tuple[str, ...]
) -> None:
    assert access_settings(AccessConfig(**access), environment, loopback_host=host).hosts == hosts


async def test_without_keys_everything_stays_open_but_administration(encoder: PromptEncoder) -> None:
    client = open_client(encoder)
    assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert (await client.get("/status")).status_code == 200
    assert (await client.get("/v1/usage")).json() == {"object": "list", "data": []}
    assert (await client.post("/admin/scale", json={"kind": "replica", "count": 2})).status_code == 403


async def test_origins_are_allowed_by_setting_alone(encoder: PromptEncoder) -> None:
    origin = {"Origin": "https://app.example.org", "Access-Control-Request-Method": "POST"}
    client = open_client(encoder, origins=("https://app.example.org",), api_key="k" * 32)
    reply = await client.options("/v1/completions", headers=origin)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://app.example.org")
    assert "x-api-key" in reply.headers["access-control-allow-headers"]
    other = await client.options("/v1/completions", headers=origin | {"Origin": "https://evil.example.org"})
    assert "access-control-allow-origin" not in other.headers
    refused = await client.get("/v1/models", headers=origin)  # pages may read why they were refused
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example.org")
    reply = await open_client(encoder).options("/v1/completions", headers=origin)
    assert "access-control-allow-origin" not in reply.headers


async def test_other_protocols_are_not_served(encoder: PromptEncoder) -> None:
    app = whole_app(ScriptedBackend(), encoder, access=AccessControl(AccessSettings(api_key="k" * 32)))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/completions", "headers": [], "subprotocols": []}
    await asyncio.wait_for(app(scope, receive, send), LONG_S)
    assert all(message["type"] == "websocket.close" for message in sent)
