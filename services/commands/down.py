"""``farsight down``: ends all of Farsight in a Ray cluster that Farsight did not start."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from farsight.actors.runtime.names import CONTROL, NAMESPACE, SUPERVISOR, actor_name
from farsight.core.errors import ConfigError, FarsightError

CONNECT_TIMEOUT_S = 5.0

TIMEOUT_S = 60.0
"""Time limit for all actors to end."""

_LOOK_S = 0.2
_SERVE_NAMESPACE = "serve"


def end_service(address: str, say: Callable[[str], None]) -> list[str]:
    """Ends the Ray Serve application and all components without waiting for streams; returns their names.

    Args:
        address: Address of the cluster; ``auto`` takes RAY_ADDRESS or else the cluster of this machine.
        say: Called with one line for each ended application or actor.

    Raises:
        FarsightError: No cluster answers there, or an actor or the application is left.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    if address != "auto":
        _check_listening(address)
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise FarsightError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        ended = _end_ingress(say) + _end_components(say)
        _wait_forgotten()
        return ended
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Checks the address first, because Ray itself retries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError("--address", address, "HOST:PORT of the cluster's head, or auto")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise FarsightError(f"no Ray cluster answers at {address}: {error}") from error


def _end_ingress(say: Callable[[str], None]) -> list[str]:
    """Ends the application before the actors, since every ingress replica starts a missing Supervisor."""
    import ray
    from ray import serve

    from farsight.services.launch.launch import APP_NAME

    ended = []
    if APP_NAME in serve.status().applications:
        ended.append(APP_NAME)
        serve.delete(APP_NAME, _blocking=False)
        say(f"ended application {APP_NAME}")
    prefix = f"SERVE_REPLICA::{APP_NAME}#"
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == _SERVE_NAMESPACE and actor["name"].startswith(prefix):
            _kill(actor["name"], _SERVE_NAMESPACE)
    return ended


def _wait_forgotten() -> None:
    """Waits until Ray Serve has no application of ours; it deletes one by and by.

    Raises:
        FarsightError: It still has after ``TIMEOUT_S``.
    """
    from ray import serve

    from farsight.services.launch.launch import APP_NAME

    deadline = time.monotonic() + TIMEOUT_S
    while APP_NAME in serve.status().applications:
        if time.monotonic() > deadline:
            raise FarsightError(f"Ray Serve still has the application {APP_NAME} after {TIMEOUT_S:.0f} s")
        time.sleep(_LOOK_S)


def _end_components(say: Callable[[str], None]) -> list[str]:
    """Ends the Supervisor first, since it restarts the other actors."""
    from farsight.actors.runtime.hosts import list_hosts

    deadline = time.monotonic() + TIMEOUT_S
    said: list[str] = []
    while hosts := list_hosts(NAMESPACE):
        if time.monotonic() > deadline:
            raise FarsightError(f"still there after {TIMEOUT_S:.0f} s: {', '.join(sorted(hosts))}")
        for host in sorted(hosts, key=lambda name: (name not in (SUPERVISOR, CONTROL), name)):
            _kill(actor_name(host), NAMESPACE)
            if host not in said:
                said.append(host)
                say(f"ended actor {host}")
        time.sleep(_LOOK_S)
    if not said:
        say("No actor of Farsight was running.")
    return said


def _kill(name: str, namespace: str) -> None:
    import ray

    with contextlib.suppress(ValueError):  # The actor has ended by itself.
        handle: Any = ray.get_actor(name, namespace=namespace)
        ray.kill(handle)
