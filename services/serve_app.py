"""For ``serve deploy``: Farsight in a Ray cluster that its operator runs (``deploy/serve.yaml``).

The builder runs in a task of Ray Serve. The actors that it creates are detached and inherit the task's runtime
environment; a deployment of the same file finds them. ``farsight down`` ends them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from farsight.actors.runtime.peer import Site
from farsight.core.config.load import FarsightConfig, load_config
from farsight.core.errors import ConfigError, FarsightError
from farsight.policies.compose import check_scheduler
from farsight.services.launch.access import check_access
from farsight.services.launch.launch import (
    default_ingress_replicas,
    find_model,
    find_site,
    ingress_app,
    start_components,
)

ANSWER_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)

_ELSEWHERE = {
    "host": "http_options.host of the same file instead",
    "port": "http_options.port of the same file instead",
    "proxy": "RAY_SERVE_ENABLE_HA_PROXY in the cluster's environment instead",
}

_HTTP_SIDE = ("server", "access")
"""Tables that only ingress replicas read, and each of those is new after a deployment."""


def app(args: dict[str, Any]) -> Any:
    """Begins to start the components and returns the Ray Serve application; its ingress replicas wait for them.

    Args:
        args: The tables of the configuration: ``{"model": {"path": ...}, "engine": {...}}``.

    Raises:
        FarsightError: A setting is wrong, or the running components have other settings.
    """
    config = config_from_tables(args)
    check_scheduler(config.scheduler)  # Refuse a wrong preset name before anything starts.
    for note in check_access(config, os.environ, proxy_host()):
        logger.warning(note)
    site = find_site(config, find_model(config))
    running = running_site(site.namespace)
    if running is not None:
        check_unchanged(running, site)
    start_components(site).supervised(None)
    return ingress_app(site, config.server.ingress_replicas or default_ingress_replicas())


def proxy_host() -> str:
    """The address that the proxies of this Ray cluster listen on: ``http_options.host`` of its first deployment."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    return str(client.http_config.host)


def config_from_tables(tables: dict[str, Any]) -> FarsightConfig:
    """The configuration, checked like a configuration file.

    Raises:
        ConfigError: A key or value is wrong, or ``serve deploy`` has the setting in another place.
    """
    for name, values in tables.items():
        if name != "replica" and not isinstance(values, dict):
            raise ConfigError(name, values, "a table of settings")
    for key, expected in _ELSEWHERE.items():
        if key in tables.get("server", {}):
            raise ConfigError(f"server.{key}", tables["server"][key], expected)
    return load_config(None, tables)


def running_site(namespace: str) -> Site | None:
    """The configuration that the running components were started with; None if no component runs."""
    import ray
    from ray.exceptions import RayError

    from farsight.actors.runtime.hosts import find_host, list_hosts

    for host in list_hosts(namespace):
        handle = find_host(host, namespace)
        if handle is not None:
            try:
                site: Site = ray.get(handle.site.remote(), timeout=ANSWER_TIMEOUT_S)
                return site
            except RayError:
                continue  # This actor is dying; another one may answer.
    return None


def check_unchanged(running: Site, wanted: Site) -> None:
    """Refuses changed settings, except those of the HTTP side: running components keep the settings they started with.

    Raises:
        FarsightError: A setting has changed; names it.
    """
    changed = [
        f"{field.name}: {getattr(running, field.name)!r} runs, {getattr(wanted, field.name)!r} is wanted"
        for field in dataclasses.fields(Site)
        if field.name != "config" and getattr(running, field.name) != getattr(wanted, field.name)
    ]
    for table in dataclasses.fields(FarsightConfig):
        old, new = getattr(running.config, table.name), getattr(wanted.config, table.name)
        if table.name not in _HTTP_SIDE and old != new:
            changed.append(f"{old} runs, {new} is wanted")
    if changed:
        raise FarsightError(f"`farsight down` first, then deploy again: {'; '.join(changed)}")
