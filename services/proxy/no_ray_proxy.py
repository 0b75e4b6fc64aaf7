"""For the process of Ray Serve's controller: behind our HAProxy, Ray's own proxy would get no client."""

from __future__ import annotations

from typing import Any


def start_no_proxy() -> None:
    """Keeps the controller from starting a proxy, a process of 120 MiB; Ray 2.60 has no setting for that.

    The controller calls this function before it makes what starts proxies: the environment names it in
    ``RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH``.
    """
    from ray.serve._private.proxy_state import ProxyStateManager

    manager: Any = ProxyStateManager
    manager._get_target_nodes = lambda self, proxy_nodes: []
