"""Keeps a server that Ray Serve starts in every ingress replica away from the network."""

from __future__ import annotations

from types import ModuleType

LOOPBACK = "127.0.0.1:0"


def keep_on_loopback(replica: ModuleType) -> None:
    """Has Ray Serve's server for calls between deployments, which takes pickles, listen on the loopback interface.

    There is one deployment, so it gets no call. Ray binds it to ``[::]`` and has no setting for its address.

    Args:
        replica: ``ray.serve._private.replica``, before it starts the server.

    Raises:
        AttributeError: This version of Ray binds the server in another way.
    """
    bind = replica.add_port_to_grpc_server

    def bind_to_loopback(server: object, address: str) -> object:
        return bind(server, LOOPBACK)

    replica.add_port_to_grpc_server = bind_to_loopback  # type: ignore[attr-defined]
