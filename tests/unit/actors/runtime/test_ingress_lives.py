"""Who has died, by the names that Ray has: a name that Ray Serve gives an ingress replica ends with its id."""

from __future__ import annotations

import pytest

from farsight.actors.runtime import component
from farsight.actors.runtime.component import gone_ingresses, without_actor

LIVING = "SERVE_REPLICA::farsight#Ingress#abcd1234"


def test_an_ingress_replica_lives_as_long_as_ray_serve_has_an_actor_for_it() -> None:
    names = [LIVING, "farsight-control", "SERVE_CONTROLLER_ACTOR"]
    assert without_actor(["abcd1234", "efgh5678", ""], names) == {"efgh5678", ""}
    assert without_actor([], names) == set()


async def test_no_ingress_replica_counts_as_dead_while_ray_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise ConnectionError("the head is away")

    assert await gone_ingresses([]) == set()
    monkeypatch.setattr(component, "_actor_names", broken)
    assert await gone_ingresses(["abcd1234"]) == set()
    monkeypatch.setattr(component, "_actor_names", lambda: [LIVING])
    assert await gone_ingresses(["abcd1234", "efgh5678"]) == {"efgh5678"}
