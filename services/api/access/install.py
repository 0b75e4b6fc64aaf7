"""Puts access control in front of an application."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import fastapi.routing
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from core.messages.tenants import TenantUsage
from services.api.access.access_control import AccessControl
from services.api.access.caller import CURRENT
from services.api.access.gate import Gate
from services.api.access.keys import Role
from services.api.access.roles import RouteRoles
from services.api.answers.replies import GPU_SECONDS_DIGITS

_EXPOSED = [
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
    "retry-after",
    "x-farsight-stream",
]
_PREFLIGHT_AGE_S = 600


class UsageOfTenant(BaseModel):
    """Sums since the service started. ``prompt_tokens`` counts the prompt of every output that was run; the
    ``cached_tokens`` are a part of them. ``gpu_seconds`` adds up what the usage of the answers said."""

    tenant: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    rejected: int
    in_flight: int
    gpu_seconds: float


class UsageReply(BaseModel):
    """``GET /v1/usage``"""

    object: str = "list"
    data: list[UsageOfTenant]


def usage_routes(access: AccessControl, errors: dict[int | str, dict[str, Any]]) -> APIRouter:
    """A key sees its own tenant; a key with the role ``observe`` or ``admin`` sees all tenants."""
    router = APIRouter(prefix="/v1", tags=["operation"], responses=errors)

    @router.get("/usage")
    async def usage() -> UsageReply:
        caller = CURRENT.get()
        rows = await access.usage()
        if caller is not None and Role.OBSERVE not in caller.roles:
            rows = tuple(row for row in rows if row.tenant == caller.tenant.name)
        return UsageReply(data=[_row(row) for row in rows])

    return router


def _row(row: TenantUsage) -> UsageOfTenant:
    counts = {name: getattr(row, name) for name in UsageOfTenant.model_fields if name != "gpu_seconds"}
    return UsageOfTenant(**counts, gpu_seconds=round(row.gpu_s, GPU_SECONDS_DIGITS))


def install_access_control(app: FastAPI, access: AccessControl) -> None:
    """Lets every request pass access control before anything else reads it; the application has all its routes."""
    app.add_middleware(functools.partial(Gate, access=access, roles=RouteRoles(route_paths(app))))
    if access.settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-farsight-resumable", "last-event-id"],
            expose_headers=_EXPOSED,
            max_age=_PREFLIGHT_AGE_S,
        )


def route_paths(app: FastAPI) -> list[str]:
    """The path templates of all routes.

    Raises:
        TypeError: As ``routes_of``.
    """
    return [route.path for route in routes_of(app)]


def routes_of(app: FastAPI) -> list[Route]:
    """All routes, with the paths and methods that the application gives them.

    Raises:
        TypeError: A mount, or another kind of route that has paths of its own.
    """
    # Later versions of FastAPI keep included routers as they are; earlier ones copy their routes.
    every: Callable[[Any], Iterable[Any]] = getattr(fastapi.routing, "iter_route_contexts", iter)
    routes = []
    for route in every(app.routes):
        original, path = getattr(route, "original_route", route), getattr(route, "path", None)
        if not isinstance(original, Route) or not isinstance(path, str):
            raise TypeError(f"access control knows no role for {original!r}; expected a route with a path of its own")
        routes.append(route)
    return routes
