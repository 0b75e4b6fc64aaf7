"""Starts Ray Serve's controller and its HTTP proxy with more patience than ``serve.start`` has."""

from __future__ import annotations

import logging
from typing import Any

from core.config.access import AccessConfig
from core.config.server import ServerConfig
from core.errors import FarsightError
from services.launch.stages import Stages, StartStage
from services.proxy.ports import LOOPBACK

_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}


def wait_routed(stages: Stages, stage: StartStage) -> None:
    """Waits until the proxy forwards requests to the running ingress.

    Raises:
        StartTimedOut: The start took longer than ``server.start_patience_s``.
    """
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    while True:
        try:
            client.wait_for_proxies_serving(wait_for_applications_running=True)
            return
        except TimeoutError:  # Ray 2.60 gives up after a constant 60 s.
            stages.check(stage)


def http_options(server: ServerConfig, access: AccessConfig, proxy: str) -> dict[str, Any]:
    """The options under which Ray Serve starts its HTTP servers.

    HAProxy listens on ``server.host`` and speaks TLS by itself (``services.proxy.haproxy_config``). Ray's servers
    behind it, the ingress replicas and the fallback proxy, listen on the loopback interface.
    """
    options: dict[str, Any] = {"host": server.host, "port": server.port}
    if proxy == "haproxy":
        return options | {"host": LOOPBACK}
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
