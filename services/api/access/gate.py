"""The ASGI layer that asks every request for its host and its key, and counts it for its tenant; and the counts."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import fastapi.routing
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farsight.core.messages.tenants import TenantUsage
from farsight.policies.tenancy.budgets import Excess, LocalBudget
from farsight.services.api.access.access_control import MAX_SLOWED, SLOW_S, AccessControl, in_flight
from farsight.services.api.access.keys import (
    CURRENT,
    SCOPE_KEY,
    Caller,
    ConflictingKeys,
    Role,
    client_address,
    host_of,
    presented_key,
)
from farsight.services.api.access.roles import Everyone, RouteRoles
from farsight.services.api.errors import ERRORS, ApiError
from farsight.services.api.generation import GPU_SECONDS_DIGITS

_LIMIT_NAMES = {
    "requests": "requests a minute",
    "tokens": "tokens a minute",
    "in_flight": "requests in flight",
}

STREAMS_PATH = "/v1/streams/"
"""Paths by which a client reads on a stream that it has begun."""


class Gate:
    """Refuses what may not come in, before anything reads the request's body.

    Args:
        roles: The roles that the application's routes ask for.
    """

    def __init__(self, app: ASGIApp, access: AccessControl, roles: RouteRoles) -> None:
        self._app = app
        self._access = access
        self._roles = roles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # No route speaks another protocol; the server closes the connection.
        try:
            self._check_host(scope)
            caller = await self._caller(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        # Also where there is none: a pipelined request may run in a copy of the context of the one before it.
        CURRENT.set(caller)
        if caller is None:
            await self._app(scope, receive, send)
            return
        scope[SCOPE_KEY] = caller
        if self._roles.of(scope) is Role.SERVE:
            await self._serve(caller, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        allowed = self._access.settings.hosts
        if not allowed:
            return
        host = host_of(scope["headers"])
        if host is None or not any(_is_named(host, name) for name in allowed):
            message = (
                f"Host: got {host!r}, expected one of {', '.join(allowed)}; access.allowed_hosts in the server's "
                "configuration sets the names"
            )
            raise ApiError(message, status=403, code="host_not_allowed")

    async def _caller(self, scope: Scope) -> Caller | None:
        """Returns the caller whose key the request carries; None where no key is needed."""
        access = self._roles.of(scope)
        if self._access.is_open or access is Everyone.PUBLIC:
            return None
        try:
            key = presented_key(scope["headers"])
        except ConflictingKeys:
            self._access.failed("conflicting")
            message = "The request holds several API keys that differ; expected one."
            raise _unauthorized(message, "conflicting_api_keys") from None
        caller = self._access.find(key)
        if caller is None:
            await self._refuse(key, scope)
        elif access is not Everyone.ANY_KEY and access not in caller.roles:
            self._access.failed("role")
            message = f"The API key {caller.name!r} has not the role {access.value!r} that {scope['path']} asks for."
            raise ApiError(message, status=403, kind="permission_error", code="insufficient_role")
        return caller

    async def _refuse(self, key: bytes, scope: Scope) -> None:
        """Raises the error for a missing or wrong key; late, after many wrong ones."""
        if not key:
            self._access.failed("missing")
            message = "The API key is missing; expected the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise _unauthorized(message, "missing_api_key")
        self._access.failed("wrong")
        address = client_address(scope, behind_haproxy=self._access.settings.behind_haproxy)
        failures = self._access.failures
        wait_s = failures.add(address, self._access.now())
        if wait_s > 0:
            if failures.num_slowed < MAX_SLOWED:
                failures.num_slowed += 1
                try:
                    await asyncio.sleep(SLOW_S)
                finally:
                    failures.num_slowed -= 1
            message = "This address has sent too many wrong API keys."
            headers = {"Retry-After": str(math.ceil(wait_s))}
            raise ApiError(
                message, status=429, kind="rate_limit_error", code="too_many_wrong_api_keys", headers=headers
            )
        raise _unauthorized("The API key is wrong, or has been revoked.", "invalid_api_key")

    async def _serve(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request that the tenant's limits count."""
        resumes = scope["path"].startswith(STREAMS_PATH)
        budget, excess = self._access.admit(caller.tenant, resumes=resumes)
        headers = limit_headers(budget, self._access.now())
        if excess is not None:
            await _too_much(caller, excess, headers).response()(scope, receive, send)
            return
        if headers:
            send = _with_headers(send, headers)
        with in_flight(budget, self._access.now):
            await self._app(scope, receive, send)


def _is_named(host: str, allowed: str) -> bool:
    return host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed


def _unauthorized(message: str, code: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(message, status=401, kind="authentication_error", code=code, headers=headers)


def _too_much(caller: Caller, excess: Excess, headers: dict[str, str]) -> ApiError:
    seconds = max(1, math.ceil(excess.retry_after_s))
    message = (
        f"Tenant {caller.tenant.name!r} has reached its limit of {excess.limit} {_LIMIT_NAMES[excess.what]}; "
        f"retry in {seconds} s."
    )
    return ApiError(
        message,
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={**headers, "Retry-After": str(seconds)},
    )


def limit_headers(budget: LocalBudget, now: float) -> dict[str, str]:
    """Returns OpenAI's headers about the limits that there are."""
    headers: dict[str, str] = {}
    for name, bucket in (("requests", budget.requests), ("tokens", budget.tokens)):
        if bucket.limit:
            bucket.refill(now)
            headers[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
            headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.limit, now):.3f}s"
    return headers


def _with_headers(send: Send, headers: dict[str, str]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return sending


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


def usage_routes(access: AccessControl) -> APIRouter:
    """Returns the route that shows a key its own tenant, and one with the role ``observe`` or ``admin`` all tenants."""
    router = APIRouter(prefix="/v1", tags=["operation"], responses=ERRORS)

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


_READ = ("authorization", "content-type", "x-api-key", "x-farsight-resumable", "x-farsight-reading-rate")
"""Headers of a page's requests that are read."""


def install_access_control(app: FastAPI, access: AccessControl) -> None:
    """Lets every request pass access control before anything else reads it; the application has all its routes."""
    app.add_middleware(functools.partial(Gate, access=access, roles=RouteRoles(route_paths(app))))
    if access.settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=[*_READ, "last-event-id"],
            expose_headers=_EXPOSED,
            max_age=_PREFLIGHT_AGE_S,
        )


def route_paths(app: FastAPI) -> list[str]:
    """Returns the path templates of all routes.

    Raises:
        TypeError: As ``routes_of``.
    """
    return [route.path for route in routes_of(app)]


def routes_of(app: FastAPI) -> list[Route]:
    """Returns all routes, with the paths and methods that the application gives them.

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
