"""What our HAProxy does, and its runner when it dies or the ingress replicas change."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from farsight.core.config.server import ServerConfig
from farsight.services.proxy import haproxy
from farsight.services.proxy.haproxy import (
    FIND_S,
    PROXY_DIRECTORY_VARIABLE,
    HAProxyRunner,
    frontend_limits,
    listening_socket,
)
from farsight.services.proxy.haproxy_config import CLIENT_HEADER, TLS_FILE, FrontendSettings, IngressServer, config_text
from tests.free_ports import free_port
from tests.unit.services.certificates import make_certificate

LONG_S = 120.0
LIMIT_S = 0.5
"""So short that a test need not wait for it; nothing bounds how long an answer may take to come."""

SILENCE_S = 4.0
"""A replica may be silent for so long; the default is an hour."""

PER_ADDRESS = 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only")


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
    """The ports of an ingress replica and of what tells of its life."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Upstream) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    Upstream.replies.clear()
    Upstream.delays.clear()
    yield [server.server_port for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


class Kept:
    """A running runner; ``servers`` are the ingress replicas that it is told."""

    def __init__(self, folder: Path, servers: list[IngressServer], head_timeout_s: float = LIMIT_S) -> None:
        self.servers = servers
        self.folder = folder
        self.port = free_port()
        server = ServerConfig(
            port=self.port,
            max_connections_per_address=PER_ADDRESS,
            head_timeout_s=head_timeout_s,
            body_timeout_s=LIMIT_S,
            idle_timeout_s=LIMIT_S,
            write_timeout_s=LIMIT_S,
        )
        self.runner = HAProxyRunner(folder, server, lambda: self.servers, "100ms", SILENCE_S)

    def __enter__(self) -> Kept:
        self.runner.start()
        self.runner.follow()
        self.until(self.runner.routes if self.servers else lambda: self.runner.pid)
        return self

    def __exit__(self, *exception: object) -> None:
        self.runner.stop()

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < deadline, (self.folder / "haproxy.log").read_text()
            time.sleep(0.02)

    @property
    def config(self) -> str:
        return (self.folder / "haproxy.cfg").read_text()

    def connect(self, timeout_s: float = LONG_S) -> closing[socket.socket]:
        return closing(socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s))

    def ask(self, path: str = "/any") -> tuple[int, str, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)) as connection:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.headers["Content-Type"], reply.read().decode()

    def outcome(self) -> int:
        """The status of a request; 0 where its connection is turned away."""
        try:
            return self.ask()[0]
        except (OSError, http.client.HTTPException):
            return 0


@pytest.fixture
def kept(tmp_path: Path, upstream: list[int]) -> Iterator[Kept]:
    replica, life = upstream
    with Kept(tmp_path, [IngressServer("abc123", "127.0.0.1", replica, life)]) as running:
        yield running


def is_openai_error(body: str) -> bool:
    return set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_what_is_no_error_of_the_api_becomes_one_with_an_honest_status(kept: Kept, upstream: list[int]) -> None:
    replica = upstream[0]
    for status, told in ((400, 400), (404, 503), (500, 503), (503, 503)):
        Upstream.replies[f"{replica} /plain"] = status, "text/plain; charset=utf-8", "Internal Server Error"
        found, kind, body = kept.ask("/plain")
        assert (found, kind, is_openai_error(body)) == (told, "application/json", True)
    passing = (503, "application/json", json.dumps({"error": {"message": "ours"}})), (200, "text/plain", "metrics")
    for reply in passing:
        Upstream.replies[f"{replica} /ours"] = reply
        assert kept.ask("/ours") == reply


def test_a_client_that_sends_no_head_is_given_up_and_an_answer_may_take_long(kept: Kept, upstream: list[int]) -> None:
    with kept.connect() as half_open:
        half_open.sendall(b"GET / HT")
        reply = b"".join(iter(lambda: half_open.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 408 ")  # HAProxy's parser has this page built in
    Upstream.delays[f"{upstream[0]} /slow"] = 3 * LIMIT_S
    assert kept.ask("/slow")[0] == 200


def test_one_address_takes_only_its_share_of_the_connections(tmp_path: Path, upstream: list[int]) -> None:
    # HAProxy ends no half-open connection before the test does, however slow the machine is.
    with (
        Kept(tmp_path, [IngressServer("abc123", "127.0.0.1", *upstream)], head_timeout_s=LONG_S) as kept,
        ExitStack() as stack,
    ):
        for _ in range(2 * PER_ADDRESS):
            stack.enter_context(kept.connect())
        kept.until(lambda: kept.outcome() in (429, 0))  # its threads count connections in any order
        assert kept.outcome() in (429, 0)
        stack.close()
        kept.until(lambda: kept.outcome() == 200)


def test_a_replica_is_judged_where_its_life_is_told(kept: Kept, upstream: list[int]) -> None:
    replica, life = upstream
    Upstream.replies[f"{replica} /-/healthz"] = 503, "text/plain", "busy"
    Upstream.replies[f"{replica} /health"] = 200, "text/plain", "asked where the work is"
    Upstream.replies[f"{life} /health"] = well = 200, "application/json", '{"status": "ok"}'
    assert kept.ask("/health") == well
    Upstream.replies[f"{life} /-/healthz"] = 503, "application/json", "{}"
    kept.until(lambda: kept.outcome() == 503)  # no server listens where the fallback should be
    assert json.loads(kept.ask()[2])["error"]["code"] == "unavailable"
    del Upstream.replies[f"{life} /-/healthz"]
    kept.until(lambda: kept.outcome() == 200)


def test_a_client_cannot_say_another_address(kept: Kept) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", kept.port, timeout=LONG_S)) as connection:
        connection.putrequest("GET", "/client")
        connection.putheader(CLIENT_HEADER, "10.9.8.7")
        connection.putheader(CLIENT_HEADER.lower(), "10.9.8.6")
        connection.endheaders()
        assert connection.getresponse().read() == b"here"
    assert Upstream.clients == ["127.0.0.1"]


def test_the_frontend_alone_listens_on_the_address_of_the_service(kept: Kept) -> None:
    """It inherits its socket; everything else in the configuration is on the loopback interface."""
    binds = [line.strip() for line in kept.config.splitlines() if "bind " in line]
    assert binds == [f"bind fd@{kept.runner._listener.fileno()}"]
    servers = [line.split()[2] for line in kept.config.splitlines() if line.startswith("    server ")]
    assert all(address.startswith("127.0.0.1:") for address in servers)
    haproxy = psutil.Process(kept.runner.pid)
    listening = {each.laddr.port for each in haproxy.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert listening == {kept.port}


@pytest.mark.parametrize(("host", "address"), [("0.0.0.0", "0.0.0.0"), ("::", "0.0.0.0"), ("127.0.0.2", "127.0.0.2")])
def test_the_socket_listens_where_it_is_told(host: str, address: str) -> None:
    with closing(listening_socket(host, port := free_port(), 60.0)) as listener:
        assert listener.getsockname() == (address, port)
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_the_frontend_speaks_tls(tmp_path: Path, upstream: list[int]) -> None:
    certificate = make_certificate(tmp_path)
    (tmp_path / TLS_FILE).write_text(certificate.read_text() + (tmp_path / "key.pem").read_text())
    context = ssl.create_default_context(cafile=str(certificate))
    with Kept(tmp_path, [IngressServer("abc123", "127.0.0.1", upstream[0])]) as running:
        secured = http.client.HTTPSConnection("127.0.0.1", running.port, timeout=LONG_S, context=context)
        with closing(secured) as connection:
            connection.request("GET", "/any")
            assert connection.getresponse().status == 200
        assert running.outcome() == 0 or running.outcome() >= 400, "plain HTTP gets no answer, or an error"


def test_without_replicas_it_answers_503(tmp_path: Path, upstream: list[int]) -> None:
    with Kept(tmp_path, []) as running:
        status, kind, body = running.ask("/health")
        assert (status, kind, is_openai_error(body)) == (503, "application/json", True)
        running.servers = [IngressServer("abc123", "127.0.0.1", *upstream)]
        running.until(running.runner.routes)
        assert running.ask()[0] == 200
        running.servers = []  # a controller that has just started knows none
        time.sleep(3 * FIND_S)
        assert running.ask()[0] == 200


def test_its_death_costs_no_request(kept: Kept) -> None:
    """The listening socket outlives it: connections wait there for the next one."""
    pids = set()
    for _ in range(5):
        pids.add(pid := kept.runner.pid)
        os.kill(pid, signal.SIGKILL)
        assert kept.ask()[0] == 200
        kept.until(lambda pid=pid: kept.runner.pid not in (0, pid))  # type: ignore[misc]
    assert len(pids) == 5
    assert kept.runner.num_starts >= 6


def test_one_that_stands_still_is_replaced(kept: Kept) -> None:
    pid = kept.runner.pid
    os.kill(pid, signal.SIGSTOP)
    kept.until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    assert kept.ask()[0] == 200  # the request waits in the listening socket
    kept.until(lambda: kept.runner.pid not in (0, pid))
    assert not psutil.pid_exists(pid)


def test_none_starts_once_the_runner_was_told_to_halt(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a start is under way at that moment: what ends the service kills what it finds, and looks once."""
    under_way, goes_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> str:
        under_way.set()
        assert goes_on.wait(LONG_S)
        return config_text(*arguments)

    monkeypatch.setattr(haproxy, "config_text", slowly)
    os.kill(kept.runner.pid, signal.SIGKILL)
    assert under_way.wait(LONG_S)
    halting = threading.Thread(target=kept.runner.halt)
    halting.start()
    halting.join(0.2)
    assert halting.is_alive(), "a HAProxy may still start"
    goes_on.set()
    halting.join(LONG_S)
    num_starts = kept.runner.num_starts
    kept.runner._threads[0].join(LONG_S)
    assert kept.runner.num_starts == num_starts
    assert kept.runner.pid == 0


class RawReplica:
    """An ingress replica that does with each connection what ``serve`` says; its life is told elsewhere."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with closing(connection), suppress(ConnectionError):
            self._serve(connection)

    def close(self) -> None:
        self._listener.close()


HEAD = b"POST /any HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_body_that_is_sent_on_after_the_answer_leaves_no_connection(tmp_path: Path, upstream: list[int]) -> None:
    """The replica has answered and takes no more, HAProxy's buffer is full, and the client goes on."""
    over = threading.Event()

    def refuse(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        connection.shutdown(socket.SHUT_WR)
        over.wait(LONG_S)

    with (
        closing(RawReplica(refuse)) as replica,
        Kept(tmp_path, [IngressServer("a", "127.0.0.1", replica.port, upstream[1])]) as kept,
        ExitStack() as clients,
    ):
        haproxy_process = psutil.Process(kept.runner.pid)

        def held() -> int:
            found = haproxy_process.net_connections("tcp")
            return sum(each.laddr.port == kept.port and each.status != psutil.CONN_LISTEN for each in found)

        held_most = 0
        for _ in range(4):
            client = clients.enter_context(kept.connect(0.5))
            client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            with suppress(OSError):  # its own buffers are full as well
                client.sendall((b"10000\r\n" + b"[" * 65536 + b"\r\n") * 200)
            held_most = max(held_most, held())
        assert held_most
        kept.until(lambda: not held())
        over.set()


def test_no_request_meets_a_connection_that_the_replica_closes(tmp_path: Path, upstream: list[int]) -> None:
    """As one does that is drained: a POST that is sent into it could only be answered by 502."""

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        connection.recv(1)  # the next request, or the end of the connection

    with (
        closing(RawReplica(serve)) as replica,
        Kept(tmp_path, [IngressServer("a", "127.0.0.1", replica.port, upstream[1])]) as kept,
    ):
        for client in range(4):
            with closing(http.client.HTTPConnection("127.0.0.1", kept.port, timeout=LONG_S)) as connection:
                for index in range(3):
                    connection.request("POST", "/any", b"{}")
                    reply = connection.getresponse()
                    assert (reply.status, reply.read()) == (200, b"{}"), (client, index)


def test_a_change_of_replicas_ends_no_answer(kept: Kept, upstream: list[int]) -> None:
    Upstream.delays[f"{upstream[0]} /slow"] = 1.0
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(kept.ask("/slow")[0]))
    before = kept.runner.pid
    asking.start()
    time.sleep(0.2)
    kept.servers = [*kept.servers, IngressServer("def", "127.0.0.1", upstream[1])]
    kept.until(lambda: kept.runner.pid not in (0, before))
    asking.join()
    assert found == [200]
    assert " def 127.0.0.1:" in kept.config
    kept.until(lambda: not psutil.pid_exists(before))  # it ends with its last connection


def test_nothing_of_it_is_left_when_it_stops(kept: Kept) -> None:
    pid = kept.runner.pid
    kept.runner.stop()
    assert not psutil.pid_exists(pid)
    with pytest.raises(OSError):
        kept.ask()


def test_the_settings_become_limits(tmp_path: Path) -> None:
    settings = FrontendSettings(7, tmp_path, 100, frontend_limits(ServerConfig()))
    lines = [line.strip() for line in config_text([], settings).splitlines()]
    for name, ms in (("http-request", 10_000), ("client", 60_000), ("http-keep-alive", 75_000)):
        assert [line for line in lines if line.startswith(f"timeout {name} ")] == [f"timeout {name} {ms}ms"]
    assert any(line.startswith("tcp-request connection reject if { sc0_conn_cur gt ") for line in lines)
    unbounded = FrontendSettings(7, tmp_path, 100, frontend_limits(ServerConfig(max_connections_per_address=0)))
    assert "sc0_conn_cur" not in config_text([], unbounded)
    assert "splice-request" not in config_text([], unbounded)


def test_a_process_that_is_abandoned_leaves_no_haproxy_and_starts_none(tmp_path: Path) -> None:
    """All its children are killed while the runner looks on, and nothing is said of it."""
    port = free_port()
    code = (
        "import logging, time; from pathlib import Path; from farsight.core.config.server import ServerConfig\n"
        "from farsight.services.launch.proxy import front_proxy\n"
        "from farsight.services.launch.signals import StopSignal\n"
        "stop = StopSignal()\n"
        f"with front_proxy(ServerConfig(port={port}), 'haproxy', stop) as runner:\n"
        "    while not runner.pid: time.sleep(0.01)\n"
        "    stop.starting(lambda: time.sleep(0.5))\n"
        "    stop.abandon(3)\n"
    )
    environment = {**os.environ, PROXY_DIRECTORY_VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=LONG_S)
    assert (done.returncode, done.stderr) == (3, b"")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=LONG_S)
