"""A running server keeps to itself: its addresses and its token."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import psutil

from tests.e2e.server import LONG_S, Server, name_of

REPLICA_METHOD = "/ray.serve.ASGIService/HandleRequest"
GCS_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def listeners(server: Server) -> list[tuple[psutil.Process, str, int]]:
    """Every listening socket of the server: process, address, port."""
    found = []
    for process in [psutil.Process(server.process.pid), *server.children()]:
        try:
            sockets = process.net_connections(kind="inet")
        except psutil.Error:
            continue  # an idle worker of Ray has ended, or is just ending
        found += [(process, each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN]
    return found


def environment(server: Server) -> dict[str, str]:
    """The environment of a process that the server has started."""
    return next(child.environ() for child in server.children() if name_of(child) == "raylet")


def call(port: int, method: str, token: str | None) -> grpc.StatusCode:
    """How a call of an empty message ends."""
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", metadata=metadata, timeout=LONG_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def check_listeners(server: Server) -> None:
    """Everything is on the loopback interface, as ``docs/security.md`` says."""
    found = [(name_of(process), address, port) for process, address, port in listeners(server)]
    assert found
    elsewhere = [each for each in found if each[1] not in LOOPBACK]
    assert not elsewhere


def test_nobody_listens_on_other_addresses(server: Server) -> None:
    check_listeners(server)


def test_ray_serves_replicas_want_the_token_even_there(server: Server) -> None:
    """One of the ports of a replica takes calls between deployments; the others do not speak gRPC."""
    ports = [port for process, _, port in listeners(server) if name_of(process).startswith("ray::ServeReplica")]
    for token in (None, "guess"):
        codes = {call(port, REPLICA_METHOD, token) for port in ports}
        assert grpc.StatusCode.UNAUTHENTICATED in codes
        assert grpc.StatusCode.OK not in codes


def test_rays_control_store_wants_the_token(server: Server) -> None:
    port = next(port for process, _, port in listeners(server) if name_of(process) == "gcs_server")
    token = Path(environment(server)["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o077 == 0
    assert call(port, GCS_METHOD, None) == grpc.StatusCode.UNAUTHENTICATED
    assert call(port, GCS_METHOD, "guess") == grpc.StatusCode.UNAUTHENTICATED
    assert call(port, GCS_METHOD, token.read_text()) == grpc.StatusCode.OK


def test_no_usage_is_reported(server: Server) -> None:
    assert environment(server)["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_failed_call_that_nobody_waits_for_leaves_no_traceback(server: Server) -> None:
    assert "RAY_IGNORE_UNHANDLED_ERRORS" in environment(server)


def test_no_process_of_ray_runs_that_nobody_asks_anything(server: Server) -> None:
    """The dashboard's agent and, behind HAProxy, Ray's own proxy: 200 MiB, and seconds of a start."""
    names = {name_of(child) for child in server.children()}
    assert not [name for name in names if any(word in name for word in ("Proxy", "DashboardAgent"))]


def test_a_start_says_what_each_stage_costs(server: Server) -> None:
    said = server.log.read_text()
    for stage in ("Command", "Ray", "Supervisor", "Components", "Model", "Proxy", "Ingress"):
        assert re.search(rf"^{stage}: \d+\.\d processor seconds", said, re.MULTILINE), stage
    whole = re.search(r"^Start: \d+\.\d processor seconds \((.*)\)\.$", said, re.MULTILINE)
    assert whole is not None and {"farsight", "raylet"} <= set(re.findall(r"(\S+) \d+\.\d", whole[1]))


def test_every_process_is_as_nice_as_the_server(server: Server) -> None:
    """Ray adds 15 to the niceness of its workers by default. Threads that learn are nicer on purpose."""
    expected = psutil.Process(server.process.pid).nice()
    niceness = {name_of(child): child.nice() for child in server.children() if name_of(child).startswith("ray::")}
    assert any(name.startswith("ray::ComponentHost") for name in niceness)
    assert niceness == dict.fromkeys(niceness, expected)
