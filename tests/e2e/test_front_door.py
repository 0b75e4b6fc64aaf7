"""A real server with keys, TLS and two ingress replicas behind HAProxy: what comes in, what is shared, what listens."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from farsight.services.api.access.keys import Role, Tenant
from farsight.services.launch.launch import EMBEDDED_NAME
from farsight.services.run_file import run_directory
from tests.e2e.server import LONG_S, Server, farsight, spawn_server, wait_until
from tests.e2e.test_hygiene import listeners
from tests.unit.services.api.access.access_support import add_key
from tests.unit.services.certificates import make_certificate

HOST = "127.0.0.2"
LIMIT = 30
PROMPT = "The same words at the beginning of every prompt. " * 12


@dataclass
class Guarded:
    server: Server
    keys: dict[str, str]
    key_file: Path
    context: ssl.SSLContext

    def ask(self, path: str, key: str = "", body: dict[str, Any] | None = None) -> tuple[int, Any, Any]:
        """Status, headers and body, over a connection of its own."""
        headers = {"Content-Type": "application/json"} | ({"x-api-key": key} if key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://{HOST}:{self.server.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=LONG_S, context=self.context) as reply:
                return reply.status, reply.headers, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def complete(self, name: str, **change: Any) -> tuple[int, Any]:
        body = {"model": EMBEDDED_NAME, "prompt": PROMPT, "max_tokens": 1, **change}
        status, _, text = self.ask("/v1/completions", self.keys[name], body)
        return status, json.loads(text)

    def cached_tokens(self, name: str, **change: Any) -> int:
        status, reply = self.complete(name, **change)
        assert status == 200, reply
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("door")
    certificate = make_certificate(folder, HOST)
    key_file = folder / "keys.json"
    keys = {
        "a1": add_key(key_file, "a1", tenant=Tenant("a")),
        "a2": add_key(key_file, "a2", tenant=Tenant("a")),
        "b": add_key(key_file, "b"),
        "limited": add_key(key_file, "limited", tenant=Tenant("limited", requests_per_minute=LIMIT)),
        "observe": add_key(key_file, "observe", Role.OBSERVE),
    }
    config = folder / "config.toml"
    config.write_text("[server]\ningress_replicas = 2\n")
    tls = ("--tls-cert", str(certificate), "--tls-key", str(folder / "key.pem"))
    flags = ("--host", HOST, "--proxy", "haproxy", "--key-file", str(key_file), "--config", str(config), *tls)
    server = spawn_server(folder / "server.log", *flags)
    run_file = run_directory() / f"{server.port}.json"

    def is_up() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        return run_file.exists() and str(server.process.pid) in run_file.read_text()

    try:
        wait_until(is_up, "the server has not started")
        yield Guarded(server, keys, key_file, ssl.create_default_context(cafile=str(certificate)))
    finally:
        server.stop()


def test_only_the_frontend_listens_on_the_address_of_the_service(guarded: Guarded) -> None:
    """Each time that one looks; HAProxy replaces its process whenever an ingress replica has come."""
    seen: set[tuple[str, int]] = set()
    frontend = (HOST, guarded.server.port)

    def is_complete() -> bool:
        seen.update((ip, port) for _, ip, port in listeners(guarded.server))
        http_ports = {(ip, port) for ip, port in seen if 30_000 <= port <= 32_700}
        assert {ip.removeprefix("::ffff:") for ip, _ in http_ports} <= {"127.0.0.1"}
        assert {(ip, port) for ip, port in seen if ip == HOST or port == frontend[1]} <= {frontend}
        return frontend in seen and len(http_ports) >= 2

    # Two ingress replicas.
    wait_until(is_complete, "the frontend, or a server behind it, does not listen")


def test_a_key_is_asked_for(guarded: Guarded) -> None:
    assert guarded.ask("/v1/models")[0] == 401
    assert guarded.ask("/status", guarded.keys["a1"])[0] == 403
    assert guarded.ask("/status", guarded.keys["observe"])[0] == 200
    assert guarded.ask("/health")[0] == 200
    for path in ("/status%0a", "//status", "/health/../status", "/-/routes/../../status"):
        assert '"actors"' not in guarded.ask(path, guarded.keys["a1"])[2]


def test_prefixes_are_shared_inside_a_tenant_alone(guarded: Guarded) -> None:
    assert guarded.cached_tokens("a1") == 0
    wait_until(lambda: guarded.cached_tokens("a1") > 0, "the prefix is not cached")
    assert guarded.cached_tokens("a2") > 0
    assert guarded.cached_tokens("b") == 0
    assert guarded.cached_tokens("b", cache_salt="x") == 0
    assert guarded.cached_tokens("a1", cache_salt="x") == 0


def test_a_limit_holds_over_both_ingress_replicas(guarded: Guarded) -> None:
    """One request after the other, so that at most those of one exchange come in twice."""
    codes = [guarded.complete("limited", prompt="hi")[0] for _ in range(3 * LIMIT)]
    assert set(codes) == {200, 429}
    assert codes.count(200) >= LIMIT
    wait_until(lambda: guarded.complete("limited", prompt="hi")[0] == 429, "the limit does not hold")
    status, headers, text = guarded.ask(
        "/v1/completions", guarded.keys["limited"], {"model": EMBEDDED_NAME, "prompt": "hi", "max_tokens": 1}
    )
    if status == 429:  # else its minute has gone on
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == (str(LIMIT), "0")
        assert int(headers["retry-after"]) >= 1
        assert json.loads(text)["error"]["code"] == "rate_limit_exceeded"


def test_usage_is_summed_over_both_ingress_replicas(guarded: Guarded) -> None:
    begun = _requests(guarded, "b")
    for _ in range(6):
        assert guarded.complete("b", prompt="hi")[0] == 200
    wait_until(lambda: _requests(guarded, "b") == begun + 6, "the usage is wrong")
    status, _, text = guarded.ask("/v1/usage", guarded.keys["a1"])
    assert (status, [row["tenant"] for row in json.loads(text)["data"]]) == (200, ["a"])
    wait_until(
        lambda: f'farsight:tenant_requests_total{{tenant="b"}} {begun + 6}.0' in _metrics(guarded), "no such series"
    )


def _requests(guarded: Guarded, tenant: str) -> int:
    rows = json.loads(guarded.ask("/v1/usage", guarded.keys["observe"])[2])["data"]
    return sum(row["requests"] for row in rows if row["tenant"] == tenant)


def _metrics(guarded: Guarded) -> str:
    return str(guarded.ask("/metrics", guarded.keys["observe"])[2])


def test_commands_of_this_user_come_in(guarded: Guarded) -> None:
    address = ("--host", HOST, "--port", str(guarded.server.port))
    done = subprocess.run(farsight("status", *address, "--json"), capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    assert sum(row["kind"] == "Ingress" for row in json.loads(done.stdout)["actors"]) == 2
    refused = subprocess.run(
        farsight("status", *address, "--api-key", guarded.keys["a1"]), capture_output=True, text=True, timeout=LONG_S
    )
    assert (refused.returncode, "has not the role 'observe'" in refused.stderr) == (1, True)


def test_a_revoked_key_is_refused_without_a_restart(guarded: Guarded) -> None:
    assert guarded.ask("/v1/models", guarded.keys["a2"])[0] == 200
    done = subprocess.run(
        farsight("keys", "revoke", "a2", "--key-file", str(guarded.key_file)), capture_output=True, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr
    wait_until(
        lambda: [guarded.ask("/v1/models", guarded.keys["a2"])[0] for _ in range(4)] == [401] * 4, "still let in"
    )
    assert guarded.ask("/v1/models", guarded.keys["a1"])[0] == 200
