"""What the Supervisor tells of the whole service for pages that ask again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from farsight.actors.runtime.names import SUPERVISOR, wanted_components, worker_name
from farsight.actors.runtime.peer import PeerLost
from farsight.actors.supervision.history import FRESH_S, History
from farsight.core.config.load import FarsightConfig
from farsight.core.messages.series import Activities, Activity, NamesQuery
from farsight.core.messages.status import ComponentCounts, ComponentRows, ComponentStatus
from farsight.core.series.components import MAX_COMPONENTS
from farsight.policies.tenancy.budgets import SharedBudgets

COUNTS = ComponentCounts(2, 1, 1, 1)
INGRESS = ComponentStatus("ingress-1", "Ingress", 9, "node-a", "ready", 0, None, 0, 0)


class Processes:
    """Every component in a process of its own; those in ``lost`` do not answer.

    Args:
        loaded: By component; so is ``preparing``.
    """

    placement = "split"

    def __init__(self, loaded: dict[str, float], preparing: Mapping[str, str] = MappingProxyType({})) -> None:
        self.lost: set[str] = set()
        self._loaded = loaded
        self._preparing = preparing
        self._host = ""

    def router(self) -> Processes:
        return self

    def host(self, host: str) -> Processes:
        self._host = host
        return self

    async def ingress_rows(self) -> ComponentRows:
        return ComponentRows((INGRESS,))

    def activity(self, query: NamesQuery) -> Any:
        async def answer() -> Activities:
            if self.lost & set(query.names):
                raise PeerLost(query.names[0])
            return Activities(tuple(Activity(self._row(name), ()) for name in query.names))

        return answer()

    def _row(self, name: str) -> ComponentStatus:
        row = ComponentStatus(name, "Some", 7, "node-a", "ready", 0, None, 0, 0)
        return dataclasses.replace(row, loaded=self._loaded.get(name), preparing=self._preparing.get(name, ""))


def history_of(peers: Processes, counts: ComponentCounts = COUNTS) -> History:
    return History(peers, FarsightConfig(), lambda: counts, SharedBudgets("a"))  # type: ignore[arg-type]


async def test_all_components_are_told_while_they_are_known() -> None:
    peers = Processes({})
    history = history_of(peers)
    assert history.seen() is None  # no second has ended yet
    peers.lost = {worker_name("1")}
    await history._note_components()
    seen = history.seen()
    assert seen is not None and seen.counts == COUNTS and seen.ingresses == (INGRESS,)
    assert {row.name for row in seen.components} == {SUPERVISOR, *wanted_components(COUNTS, 1)}
    assert [row.name for row in seen.components if row.state == "dead"] == [worker_name("1")]
    history._rows_at -= FRESH_S
    assert history.seen() is None  # the last look is too long ago


async def test_components_that_are_not_asked_are_not_left_out_silently() -> None:
    counts = dataclasses.replace(COUNTS, length_predictors=MAX_COMPONENTS)
    history = history_of(Processes({}), counts)
    await history._note_components()
    assert history.seen() is None


async def test_workers_tell_how_much_they_have_loaded() -> None:
    for loaded, share in (({}, None), ({"worker-0": 0.5}, 0.25), ({"worker-0": 1.0, "worker-1": 0.5}, 0.75)):
        history = history_of(Processes(loaded))
        assert history.loaded() is None
        await history._note_components()
        assert history.loaded() == share
        assert history.preparing() == ""


async def test_a_worker_tells_what_holds_up_its_start() -> None:
    history = history_of(Processes({"worker-0": 1.0}, {"worker-1": "compiling kernels"}))
    assert history.preparing() == ""
    await history._note_components()
    assert history.preparing() == "compiling kernels"
