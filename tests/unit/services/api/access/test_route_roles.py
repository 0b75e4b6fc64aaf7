"""The role of a route is that of the path which the router matches, below whatever root path."""

from __future__ import annotations

import pytest

from services.api.access.keys import Role
from services.api.access.roles import Access, Everyone, RouteRoles

ROLES = RouteRoles(["/health", "/admin/scale"])


@pytest.mark.parametrize(
    ("root", "path", "role"),
    [
        ("", "/admin/scale", Role.ADMIN),
        ("/app", "/app/admin/scale", Role.ADMIN),
        ("/app", "/admin/scale", Role.ADMIN),
        ("/app", "/app/health", Everyone.PUBLIC),
        ("/health", "/health/admin/scale", Role.ADMIN),
        ("/app", "/apphealth", Everyone.ANY_KEY),
        ("/app/", "/app/health", Everyone.ANY_KEY),
        ("/app", "/app", Everyone.ANY_KEY),
    ],
)
def test_a_root_path_opens_nothing(root: str, path: str, role: Access) -> None:
    assert ROLES.of({"type": "http", "path": path, "root_path": root}) is role
