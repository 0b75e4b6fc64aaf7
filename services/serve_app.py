"""For ``serve deploy``: Farsight in a Ray cluster that somebody else runs (``deploy/serve.yaml``).

The builder runs in a task of Ray Serve. The actors that it creates are detached and inherit the task's runtime
environment; a deployment of the same file finds them. ``farsight down`` ends them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from actors.runtime.site import Site
from core.config.load import FarsightConfig, load_config
from core.errors import ConfigError, FarsightError
from policies.compose import check_scheduler
from services.launch.launch import default_ingress_replicas, find_model, find_site, ingress_app, start_components

ANSWER_TIMEOUT_S = 10.0

_ELSEWHERE = {
    "host": "http_options.host of the same file instead",
    "port": "http_options.port of the same file instead",
    "proxy": "RAY_SERVE_ENABLE_HA_PROXY in the cluster's environment instead",
}


def app(args: dict[str, Any]) -> Any:
    """The Ray Serve application over the components, which begin to start; the ingress replicas wait for them.

    Args:
        args: The tables of the configuration: ``{"model": {"path": ...}, "engine": {...}}``.

    Raises:
        FarsightError: a wrong setting, or components run whose settings are others.
    """
    config = config_from_tables(args)
    check_scheduler(config.scheduler)  # a wrong name is refused before anything starts
    site = find_site(config, find_model(config))
    running = running_site(site.namespace)
    if running is not None:
        check_unchanged(running, site)
    start_components(site)
    return ingress_app(site, config.server.ingress_replicas or default_ingress_replicas())


def config_from_tables(tables: dict[str, Any]) -> FarsightConfig:
    """The configuration, checked like a file of it.

    Raises:
        ConfigError: a wrong key or value, or a setting that ``serve deploy`` has in another place.
    """
    for name, values in tables.items():
        if name != "replica" and not isinstance(values, dict):
            raise ConfigError(name, values, "a table of settings")
    for key, expected in _ELSEWHERE.items():
        if key in tables.get("server", {}):
            raise ConfigError(f"server.{key}", tables["server"][key], expected)
    return load_config(None, tables)


def running_site(namespace: str) -> Site | None:
    """What the components that run were started with."""
    import ray
    from ray.exceptions import RayError

    from actors.runtime.hosts import find_host, list_hosts

    for host in list_hosts(namespace):
        handle = find_host(host, namespace)
        if handle is not None:
            try:
                site: Site = ray.get(handle.site.remote(), timeout=ANSWER_TIMEOUT_S)
                return site
            except RayError:
                continue  # it is dying; another one may tell
    return None


def check_unchanged(running: Site, wanted: Site) -> None:
    """The components keep the settings that they were started with; only those of the HTTP side may change.

    Raises:
        FarsightError: names what has changed.
    """
    changed = [
        f"{field.name}: {getattr(running, field.name)!r} runs, {getattr(wanted, field.name)!r} is wanted"
        for field in dataclasses.fields(Site)
        if field.name != "config" and getattr(running, field.name) != getattr(wanted, field.name)
    ]
    for table in dataclasses.fields(FarsightConfig):
        old, new = getattr(running.config, table.name), getattr(wanted.config, table.name)
        if table.name != "server" and old != new:
            changed.append(f"{old} runs, {new} is wanted")
    if changed:
        raise FarsightError(f"`farsight down` first, then deploy again: {'; '.join(changed)}")
