"""On which node a host is created, and what Ray sets aside for ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from farsight.actors.runtime import hosts as host_module
from farsight.actors.runtime.hosts import ClusterNode, choose_node, head_node
from farsight.actors.runtime.names import host_of, rank_name, rank_of, wanted_components, worker_name
from farsight.actors.runtime.peer import Site
from farsight.core.config.actors import ActorsConfig
from farsight.core.config.engine import EngineConfig, ModelConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.messages.status import ComponentCounts

HEAD = ClusterNode("h", is_head=True, computes=True)
A, B = (ClusterNode(name, is_head=False, computes=True) for name in "ab")


def test_replicas_spread_and_the_head_takes_one_last() -> None:
    homes: dict[str, str] = {}
    for replica in "012345":
        homes[replica] = choose_node(replica, homes, [HEAD, B, A])
    assert list(homes.values()) == ["a", "b", "h", "a", "b", "h"]


def test_a_head_without_cpus_takes_none_unless_there_is_nothing_else() -> None:
    idle = ClusterNode("h", is_head=True, computes=False)
    assert choose_node("0", {"1": "a", "2": "a"}, [idle, A]) == "a"
    assert choose_node("0", {}, [idle]) == "h"


def test_a_replica_stays_where_it_is_until_its_node_is_lost() -> None:
    homes = {"0": "a", "1": "a", "2": "a"}
    assert choose_node("1", homes, [HEAD, A, B]) == "a"
    assert choose_node("1", homes, [HEAD, B]) == "b"
    assert choose_node("1", {"0": "b", "1": "a", "2": "h"}, [HEAD, B]) == "b", "of equals not the head"
    assert choose_node("1", {"0": "b", "1": "a"}, [HEAD, B]) == "h"


def test_a_node_that_joins_gets_the_next_replica() -> None:
    assert choose_node("2", {"0": "b", "1": "h"}, [HEAD, A, B]) == "a"


def test_the_head_is_known() -> None:
    assert head_node([A, HEAD, B]) == "h"
    assert head_node([A]) == ""


def test_a_replica_goes_where_a_gpu_is_left() -> None:
    large = ClusterNode("l", is_head=False, computes=True, num_gpus=2)
    homes: dict[str, str] = {}
    for replica in "012":
        homes[replica] = choose_node(replica, homes, [HEAD, A, large], on_gpu=True)
    assert homes == {"0": "l", "1": "l", "2": "a"}, "the third waits, wherever it is"
    assert choose_node("0", {}, [HEAD, A, large]) == "a"


class Groups:
    """Placement groups by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, tuple[list[dict[str, float]], str, str | None]] = {}
        patch.setattr(host_module, "get_placement_group", self.get)
        patch.setattr(host_module, "placement_group", self.create)
        patch.setattr(host_module, "remove_placement_group", self.remove)

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
    options = [host_module.rank_options(host, where) for host in hosts]
    assert groups.asked == {"farsight-replica-3": ([{"GPU": 1.0}] * 4, "PACK", "detached")}
    strategies = [each["scheduling_strategy"] for each in options]
    assert [each.placement_group for each in strategies] == ["farsight-replica-3"] * 4
    assert [each.placement_group_bundle_index for each in strategies] == [0, 1, 2, 3]
    assert [each["num_gpus"] for each in options] == [1.0] * 4


def test_each_replica_has_a_group_of_its_own_until_it_is_given_up(groups: Groups) -> None:
    for replica in "01":
        host_module.rank_options(worker_name(replica), site())
    assert [bundles for bundles, _, _ in groups.asked.values()] == [[{"CPU": 0.01}] * 4] * 2
    host_module.remove_rank_group("1", site())
    host_module.remove_rank_group("1", site())
    assert list(groups.asked) == ["farsight-replica-0"]


def test_nothing_is_asked_for_others(groups: Groups) -> None:
    assert host_module.rank_options("control", site()) == {}
    assert host_module.rank_options("length-predictor-0", site()) == {}
    assert host_module.rank_options(worker_name("0"), site(1, 1)) == {}
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
