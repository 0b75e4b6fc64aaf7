"""The address of Ray Serve's server for calls between deployments."""

from __future__ import annotations

from types import ModuleType

import pytest

from services.proxy.loopback import keep_on_loopback


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
