"""Unit tests need neither Ray nor a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import pytest


@pytest.fixture(autouse=True)
def forbid_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A unit test that starts Ray is in the wrong folder."""
    import ray

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("unit tests must not start Ray")

    monkeypatch.setattr(ray, "init", refuse)
    yield
