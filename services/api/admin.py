"""Routes that only the operator may use: every request must carry the admin token."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from farsight.core.errors import FarsightError, InvalidValueError
from farsight.core.messages.status import ComponentCounts, Scale
from farsight.core.messages.supervision import DrainReplica, Upgrade
from farsight.services.api.access.keys import is_admin
from farsight.services.api.backend import Operator
from farsight.services.api.bodies import JsonRoute
from farsight.services.api.errors import ApiError, ErrorReply
from farsight.services.api.fields import StrictModel

INGRESS = "ingress"
MAX_COUNT = 1000
MAX_NAME = 100
MAX_PATH = 4096
MAX_DRAIN_S = 86_400.0

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Administration:
    """The admin token and what it allows.

    Attributes:
        token: The admin token; if empty, every admin request is refused.
        scales_ingress: Whether the launcher adjusts the number of ingress replicas to the wanted number.
    """

    token: str = ""
    scales_ingress: bool = True


class ScaleRequest(StrictModel):
    """``POST /admin/scale``"""

    kind: str
    count: int = Field(ge=1, le=MAX_COUNT)


class DrainRequest(StrictModel):
    """``POST /admin/drain``"""

    replica: str = Field(max_length=MAX_NAME)
    cancel: bool = False


class UpgradeRequest(StrictModel):
    """``POST /admin/upgrade``

    Attributes:
        model: A directory on the machine of the service; empty for the running weights.
        config: Tables of settings, as in a configuration file.
    """

    model: str = Field(default="", max_length=MAX_PATH)
    config: dict[str, Any] | None = None
    surge: bool = True
    drain_s: float = Field(default=600.0, ge=0.0, le=MAX_DRAIN_S)


class UpgradeReply(BaseModel):
    """The weights that all replicas run."""

    version: int
    model: str


class DrainReply(BaseModel):
    """``drained`` is false where the replica takes requests again, or was taken back while it drained."""

    replica: str
    drained: bool


class ScaleReply(BaseModel):
    """Current counts; ``ingress_replicas`` is null until a number has been requested."""

    replicas: int
    length_predictors: int
    serving_time_estimators: int
    image_encoders: int
    ingress_replicas: int | None


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": description}
    for status, description in {
        400: "The kind or the count is wrong.",
        401: "The token is missing or wrong.",
        403: "The service has no admin token.",
        503: "The change could not be made now.",
    }.items()
}


def admin_routes(operator: Operator, administration: Administration) -> APIRouter:
    """The routes under ``/admin``."""
    router = APIRouter(prefix="/admin", tags=["administration"], route_class=_guarded(administration.token))

    @router.post("/scale", responses=_ERRORS)
    async def scale(body: ScaleRequest) -> ScaleReply:
        if body.kind == INGRESS and not administration.scales_ingress:
            raise InvalidValueError(
                "kind", body.kind, "another kind: server.ingress_replicas in the file of `serve deploy` says it"
            )
        return _reply(await _changed(operator.supervisor.scale(Scale(body.kind, body.count)), "not_scaled"))

    @router.post("/drain", responses=_ERRORS)
    async def drain(body: DrainRequest) -> DrainReply:
        order = DrainReplica(body.replica, body.cancel)
        counts = await _changed(operator.supervisor.drain_replica(order), "not_drained")
        return DrainReply(replica=body.replica, drained=body.replica in counts.drained)

    @router.post("/upgrade", responses=_ERRORS)
    async def upgrade(body: UpgradeRequest) -> UpgradeReply:
        if not body.model and body.config is None:
            raise InvalidValueError("model", body.model, "a model directory, or config with the settings to change")
        if "\0" in body.model:
            raise InvalidValueError("model", body.model, "the absolute path of a model directory, without NUL bytes")
        settings = "" if body.config is None else json.dumps(body.config)
        order = Upgrade(body.model, body.surge, body.drain_s, settings)
        weights = await _changed(operator.supervisor.upgrade(order), "not_upgraded")
        return UpgradeReply(version=weights.version, model=weights.model_dir)

    return router


async def _changed(change: Coroutine[Any, Any, R], code: str) -> R:
    """What a change returns.

    Args:
        code: Code of the error, if the change fails.
    """
    try:
        return await change
    except InvalidValueError as error:
        # A new error: the text of an error that came through Ray is a traceback.
        raise InvalidValueError(error.field, error.value, error.expected) from error
    except FarsightError as error:
        message = f"The change was not made, or only in part: {getattr(error, 'cause', error)}"
        raise ApiError(message, status=503, code=code) from error


def _reply(counts: ComponentCounts) -> ScaleReply:
    return ScaleReply(
        replicas=counts.replicas,
        length_predictors=counts.length_predictors,
        serving_time_estimators=counts.serving_time_estimators,
        image_encoders=counts.image_encoders,
        ingress_replicas=counts.ingress_replicas or None,
    )


def _guarded(token: str) -> type[JsonRoute]:
    """A route that checks the token before it reads the body."""

    class GuardedRoute(JsonRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                if not is_admin(request.scope):
                    _check_token(request.headers.get("authorization"), token)
                return await handle(request)

            return guarded

    return GuardedRoute


def _check_token(header: str | None, token: str) -> None:
    if not token:
        message = (
            "Administration is off: this service has no admin token. `farsight serve` makes one; under `serve deploy` "
            "set FARSIGHT_ADMIN_TOKEN in the environment of the Ray cluster before it starts."
        )
        raise ApiError(message, status=403, code="admin_disabled")
    scheme, _, given = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        found = "missing" if header is None else "wrong"
        message = f"The admin token is {found}; expected the header 'Authorization: Bearer TOKEN'."
        raise ApiError(message, status=401, code="invalid_admin_token", headers={"WWW-Authenticate": "Bearer"})
