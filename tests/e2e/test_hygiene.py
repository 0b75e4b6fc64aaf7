"""A running server keeps to itself: its addresses and its token."""

from __future__ import annotations

from pathlib import Path

import grpc
import psutil

from tests.e2e.server import LONG_S, Server, name_of

GCS_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
REPLICA_METHOD = "/ray.serve.ASGIService/HandleRequest"
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def listeners(server: Server) -> list[tuple[psutil.Process, str, int]]:
    """Every listening socket of the server: process, address, port."""
    found = []
    for process in [psutil.Process(server.process.pid), *server.children()]:
        try:
            sockets = process.net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue  # an idle worker of Ray has ended
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
    """All on loopback but one: Ray Serve's replicas take calls, with the token, on ``[::]``; it is fixed in Ray."""
    for process, address, port in listeners(server):
        if address not in LOOPBACK:
            name = name_of(process)
            assert name.startswith("ray::ServeReplica"), f"{name} listens on {address}:{port}"
            for token in (None, "guess"):
                assert call(port, REPLICA_METHOD, token) == grpc.StatusCode.UNAUTHENTICATED


def test_nobody_listens_on_other_addresses_without_the_token(server: Server) -> None:
    check_listeners(server)


def test_rays_control_store_wants_the_token(server: Server) -> None:
    port = next(port for process, _, port in listeners(server) if name_of(process) == "gcs_server")
    token = Path(environment(server)["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o077 == 0
    assert call(port, GCS_METHOD, None) == grpc.StatusCode.UNAUTHENTICATED
    assert call(port, GCS_METHOD, "guess") == grpc.StatusCode.UNAUTHENTICATED
    assert call(port, GCS_METHOD, token.read_text()) == grpc.StatusCode.OK


def test_no_usage_is_reported(server: Server) -> None:
    assert environment(server)["RAY_USAGE_STATS_ENABLED"] == "0"


def test_every_process_is_as_nice_as_the_server(server: Server) -> None:
    """Ray adds 15 to the niceness of its workers by default. Threads that learn are nicer on purpose."""
    expected = psutil.Process(server.process.pid).nice()
    niceness = {name_of(child): child.nice() for child in server.children() if name_of(child).startswith("ray::")}
    assert any(name.startswith("ray::ComponentHost") for name in niceness)
    assert niceness == dict.fromkeys(niceness, expected)
