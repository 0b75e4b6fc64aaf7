"""Starts Ray Serve's controller and its HTTP proxy with more patience than ``serve.start`` has, and HAProxy."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farsight.core.config.server import AccessConfig, ServerConfig
from farsight.core.errors import FarsightError
from farsight.services.launch.signals import StopSignal
from farsight.services.launch.stages import Stages, StartStage
from farsight.services.launch.starting import LOOK_S
from farsight.services.proxy.haproxy import PROXY_DIRECTORY_VARIABLE, HAProxyRunner
from farsight.services.proxy.haproxy_config import IngressServer, read_liveness
from farsight.services.proxy.ports import LOOPBACK

_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}


FIND_TIMEOUT_S = 2.0
"""For the controller to list the ingress replicas; while it is down HAProxy goes on with those it knows."""


@contextlib.contextmanager
def front_proxy(server: ServerConfig, proxy: str, stop: StopSignal) -> Iterator[HAProxyRunner | None]:
    """Our HAProxy, which answers 503 until there are ingress replicas; None where Ray Serve's own proxy is in front."""
    if proxy != "haproxy":
        yield None
        return
    import ray.serve.context  # noqa: F401, the runner's thread and this one may not be the first to import it at once

    directory = Path(os.environ[PROXY_DIRECTORY_VARIABLE])
    runner = HAProxyRunner(directory, server, lambda: ingress_servers(directory))
    stop.keeps(runner.halt)
    runner.start()
    try:
        yield runner
    finally:
        runner.stop()


def ingress_servers(directory: Path) -> list[IngressServer] | None:
    """The ingress replicas that Ray Serve's controller knows; None if it cannot say."""
    import ray
    from ray.exceptions import RayError
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    try:
        # Without retries: those of a cluster that ends go on, and Ray complains of each.
        asked = client._controller.get_target_groups.options(max_task_retries=0).remote()
        groups = ray.get(asked, timeout=FIND_TIMEOUT_S)
    except RayError:
        return None
    liveness = read_liveness(directory)
    found = []
    for target in (target for group in groups for target in group.targets):
        name = target.name.rpartition("#")[2]
        found.append(IngressServer(name, target.ip, target.port, liveness.get(name, 0)))
    return found


def wait_routed(stages: Stages, stage: StartStage, runner: HAProxyRunner | None) -> None:
    """Waits until the proxy forwards requests to the running ingress.

    Raises:
        StartTimedOut: The start took longer than ``server.start_patience_s``.
    """
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    while runner is not None and not runner.routes():
        stages.check(stage)
        time.sleep(LOOK_S)
    while runner is None:
        try:
            client.wait_for_proxies_serving(wait_for_applications_running=True)
            return
        except TimeoutError:  # Ray 2.60 gives up after a constant 60 s.
            stages.check(stage)


def http_options(server: ServerConfig, access: AccessConfig, proxy: str) -> dict[str, Any]:
    """The options under which Ray Serve starts its HTTP servers.

    HAProxy listens on ``server.host`` and speaks TLS by itself (``services.proxy.haproxy_config``). The ingress
    replicas behind it listen on the loopback interface.
    """
    if proxy == "haproxy":
        return {"host": LOOPBACK}
    options: dict[str, Any] = {"host": server.host, "port": server.port}
    if access.tls_cert:
        options |= {"ssl_certfile": access.tls_cert, "ssl_keyfile": access.tls_key}
    return options


class ProxyStart:
    """A proxy that is about to start. Its constructor returns when the controller is up.

    ``serve.start`` gives up after a constant 60 s in Ray 2.60, too early on a busy machine. This class makes the same
    calls without that wait; callers poll ``ready`` until the proxy listens.

    Args:
        server: Its address and port.
        access: Its TLS.
        proxy: ``serve`` or ``haproxy``.
    """

    def __init__(self, server: ServerConfig, access: AccessConfig, proxy: str) -> None:
        from ray.serve._private import api

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # Ray's log lines here are meant for its developers.
        self._http_options = http_options(server, access, proxy)
        create: Any = api._create_controller_and_proxy_refs
        self._controller, self._proxies = create(
            http_options=self._http_options,
            grpc_options=None,
            global_logging_config=_LOGGING,
            global_tracing_config=None,
            controller_options=api._coerce_controller_options(None),
            proxy_location="HeadOnly",
        )

    def ready(self, wait_s: float) -> bool:
        """Whether the proxy listens; waits at most this long.

        Raises:
            FarsightError: The proxy cannot start.
        """
        import ray
        from ray import serve

        if self._proxies:
            _, missing = ray.wait(self._proxies, num_returns=len(self._proxies), timeout=wait_s)
            if missing:
                return False
            try:
                ray.get(self._proxies)
            except ray.exceptions.RayTaskError as error:
                raise FarsightError(f"the HTTP proxy cannot start: {error.cause!r}") from error
            except ray.exceptions.RayActorError:
                # The controller ends a proxy that is not up in 3 minutes and starts another one.
                handles = ray.get(self._controller.get_proxies.remote())
                self._proxies = [handle.ready.remote() for handle in handles.values()]
                return False
        serve.start(http_options=self._http_options)  # finds the controller
        return True
