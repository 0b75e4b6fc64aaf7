"""The caller of the request that is being served, for code below the routes."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import Scope

from services.api.access.keys import Caller, Role

CURRENT: ContextVar[Caller | None] = ContextVar("farsight_caller", default=None)
"""Set for the task that serves a request, and so for the tasks that it starts; None where no keys are in use."""

SCOPE_KEY = "farsight.caller"


def is_admin(scope: Scope) -> bool:
    """Whether the request carries a key with the role ``admin``."""
    caller: Caller | None = scope.get(SCOPE_KEY)
    return caller is not None and Role.ADMIN in caller.roles


def may_observe() -> bool:
    """Whether the caller may know how the server is set up: it has a role of an operator, or no keys are in use."""
    caller = CURRENT.get()
    return caller is None or not caller.roles.isdisjoint((Role.OBSERVE, Role.ADMIN))


def tenant_name() -> str:
    """Whose files, batches and responses the caller sees: its tenant's; empty, for all, where no keys are in use."""
    caller = CURRENT.get()
    return "" if caller is None else caller.tenant.name
