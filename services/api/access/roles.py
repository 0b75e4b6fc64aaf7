"""Which role each route asks for. A route that is not in the table asks for ``ADMIN``; a test asks for an entry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum

from starlette.routing import compile_path
from starlette.types import Scope

from farsight.services.api.access.keys import Role


class Everyone(Enum):
    """Who may use a route whatever their role."""

    PUBLIC = "public"
    """No key is asked for: the route tells nothing about requests, tenants or the machine."""

    ANY_KEY = "any key"


Access = Role | Everyone

ROLES: Mapping[str, Access] = {
    "/health": Everyone.PUBLIC,
    "/health/ready": Everyone.PUBLIC,
    "/": Everyone.PUBLIC,
    "/ping": Everyone.PUBLIC,
    "/docs": Everyone.PUBLIC,
    "/openapi.json": Everyone.PUBLIC,
    # The pages themselves hold no data; what they show, they ask for with a key.
    "/dashboard": Everyone.PUBLIC,
    "/dashboard/requests": Everyone.PUBLIC,
    "/dashboard/sessions": Everyone.PUBLIC,
    "/dashboard/requests/{response_id}": Everyone.PUBLIC,
    "/dashboard/scheduler": Everyone.PUBLIC,
    "/dashboard/placement": Everyone.PUBLIC,
    "/dashboard/services": Everyone.PUBLIC,
    "/dashboard/forecasts": Everyone.PUBLIC,
    "/play": Everyone.PUBLIC,
    "/v1/models": Everyone.ANY_KEY,
    "/v1/models/{model_id:path}": Everyone.ANY_KEY,
    "/v1/usage": Everyone.ANY_KEY,
    "/version": Everyone.ANY_KEY,
    "/tokenize": Role.SERVE,
    "/detokenize": Role.SERVE,
    "/tokenizer_info": Everyone.ANY_KEY,
    "/v1/completions": Role.SERVE,
    "/v1/files": Role.SERVE,
    "/v1/files/{file_id}": Role.SERVE,
    "/v1/files/{file_id}/content": Role.SERVE,
    "/v1/batches": Role.SERVE,
    "/v1/batches/{batch_id}": Role.SERVE,
    "/v1/batches/{batch_id}/cancel": Role.SERVE,
    "/v1/embeddings": Role.SERVE,
    "/v1/score": Role.SERVE,
    "/score": Role.SERVE,
    "/v1/rerank": Role.SERVE,
    "/v2/rerank": Role.SERVE,
    "/rerank": Role.SERVE,
    "/v1/chat/completions": Role.SERVE,
    "/v1/messages": Role.SERVE,
    "/v1/messages/count_tokens": Role.SERVE,
    "/api/chat": Role.SERVE,
    "/api/generate": Role.SERVE,
    "/api/embed": Role.SERVE,
    "/api/embeddings": Role.SERVE,
    "/api/show": Everyone.ANY_KEY,
    "/api/tags": Everyone.ANY_KEY,
    "/api/ps": Everyone.ANY_KEY,
    "/api/version": Everyone.ANY_KEY,
    # These change nothing: they refuse.
    "/api/pull": Everyone.ANY_KEY,
    "/api/push": Everyone.ANY_KEY,
    "/api/create": Everyone.ANY_KEY,
    "/api/copy": Everyone.ANY_KEY,
    "/api/delete": Everyone.ANY_KEY,
    "/api/blobs/{digest}": Everyone.ANY_KEY,
    "/v1/responses": Role.SERVE,
    "/v1/responses/{response_id}": Role.SERVE,
    "/v1/responses/{response_id}/cancel": Role.SERVE,
    "/v1/responses/{response_id}/input_items": Role.SERVE,
    "/v1/streams/{stream_id}": Role.SERVE,
    "/v1/requests/{response_id}": Everyone.ANY_KEY,
    "/v1/requests/{response_id}/what-if": Everyone.ANY_KEY,
    "/load": Role.OBSERVE,
    "/status": Role.OBSERVE,
    "/metrics": Role.OBSERVE,
    "/placement": Role.OBSERVE,
    "/live": Role.OBSERVE,
    "/live/status": Role.OBSERVE,
    "/live/replicas": Role.OBSERVE,
    "/live/components": Role.OBSERVE,
    "/live/series": Role.OBSERVE,
    "/live/what-if": Role.OBSERVE,
    "/live/requests": Role.OBSERVE,
    "/live/sessions": Role.OBSERVE,
    "/live/requests/{response_id}": Role.OBSERVE,
    "/admin/scale": Role.ADMIN,
    "/admin/drain": Role.ADMIN,
    "/admin/upgrade": Role.ADMIN,
}
"""By the path template of the route. A new route of the application needs a line here."""


def _path_of(scope: Scope) -> str:
    """Returns the path below the root path of the application, which is what the router matches."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    below = path.removeprefix(root)
    return below if below.startswith("/") or not below else path


class RouteRoles:
    """Finds the role for a request by the path that the application's own router will see.

    Args:
        paths: Path templates of the application's routes, in their order.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._exact: dict[str, Access] = {}
        self._patterns: list[tuple[re.Pattern[str], Access]] = []
        for path in paths:
            access = ROLES.get(path, Role.ADMIN)
            self._exact.setdefault(path, access)
            # The router's own pattern: it also takes what one would not think of, such as a line break at the end.
            self._patterns.append((compile_path(path)[0], access))

    def of(self, scope: Scope) -> Access:
        """``ANY_KEY`` for a path without a route: who has a key may learn that there is none."""
        path = _path_of(scope)
        found = self._exact.get(path)
        if found is not None:
            return found
        for pattern, access in self._patterns:
            if pattern.match(path):
                return access
        return Everyone.ANY_KEY
