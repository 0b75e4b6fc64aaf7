"""What is asked of Ray for the processes of a replica; Ray itself is not asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from actors.runtime import hosts as rank_groups
from actors.runtime.names import host_of, rank_name, rank_of, wanted_components, worker_name
from actors.runtime.peer import Site
from core.config.actors import ActorsConfig
from core.config.engine import EngineConfig, ModelConfig
from core.config.load import FarsightConfig
from core.messages.status import ComponentCounts


class Groups:
    """Placement groups by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, tuple[list[dict[str, float]], str, str | None]] = {}
        patch.setattr(rank_groups, "get_placement_group", self.get)
        patch.setattr(rank_groups, "placement_group", self.create)
        patch.setattr(rank_groups, "remove_placement_group", self.remove)

    def get(self, name: str) -> str:
        if name not in self.asked:
            raise ValueError(name)
        return name

    def create(self, bundles: list[dict[str, float]], strategy: str, name: str, lifetime: str | None) -> str:
        assert name not in self.asked
        self.asked[name] = bundles, strategy, lifetime
        return name

    def remove(self, name: str) -> None:
        del self.asked[name]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(monkeypatch)


def site(tensor: int = 2, pipeline: int = 2, **actors: Any) -> Site:
    config = FarsightConfig(
        model=ModelConfig(tensor_parallel=tensor, pipeline_parallel=pipeline), actors=ActorsConfig(**actors)
    )
    return Site(config, "", "fused")


def test_all_ranks_of_a_replica_are_in_one_group_each_in_its_place(groups: Groups) -> None:
    where = site(gpus_per_rank=1.0)
    hosts = [worker_name("3"), *(rank_name("3", rank) for rank in (1, 2, 3))]
    options = [rank_groups.rank_options(host, where) for host in hosts]
    assert groups.asked == {"farsight-replica-3": ([{"GPU": 1.0}] * 4, "PACK", "detached")}
    strategies = [each["scheduling_strategy"] for each in options]
    assert [each.placement_group for each in strategies] == ["farsight-replica-3"] * 4
    assert [each.placement_group_bundle_index for each in strategies] == [0, 1, 2, 3]
    assert [each["num_gpus"] for each in options] == [1.0] * 4


def test_each_replica_has_a_group_of_its_own_until_it_is_given_up(groups: Groups) -> None:
    for replica in "01":
        rank_groups.rank_options(worker_name(replica), site())
    assert [bundles for bundles, _, _ in groups.asked.values()] == [[{"CPU": 0.01}] * 4] * 2
    rank_groups.remove_rank_group("1", site())
    rank_groups.remove_rank_group("1", site())
    assert list(groups.asked) == ["farsight-replica-0"]


def test_nothing_is_asked_for_others(groups: Groups) -> None:
    assert rank_groups.rank_options("control", site()) == {}
    assert rank_groups.rank_options("length-predictor-0", site()) == {}
    assert rank_groups.rank_options(worker_name("0"), site(1, 1)) == {}
    assert groups.asked == {}


@pytest.mark.parametrize("asked", [0.0, 0.5, 2.0])
def test_the_number_of_gpus_can_be_set(asked: float) -> None:
    assert site(gpus_per_rank=asked).config.gpus_per_rank == asked
    assert site(1, 1, gpus_per_rank=asked).config.gpus_per_rank == 0.0, "that is for several ranks"


def test_each_rank_has_a_gpu_where_it_computes_on_one() -> None:
    assert site().config.gpus_per_rank == 0.0
    assert dataclasses.replace(site().config, engine=EngineConfig(device="cuda")).gpus_per_rank == 1.0


def test_ranks_have_names_and_hosts_of_their_own() -> None:
    components = wanted_components(ComponentCounts(2, 1, 1, 0), 2)
    ranks = {component: rank_of(component) for component in components if rank_of(component) is not None}
    assert ranks == {"worker-0": ("0", 0), "rank-0.1": ("0", 1), "worker-1": ("1", 0), "rank-1.1": ("1", 1)}
    assert all(host_of(name, "fused") == name for name in ranks)
    assert not [
        component for component in wanted_components(ComponentCounts(2, 1, 1, 0), 1) if component.startswith("rank")
    ]
