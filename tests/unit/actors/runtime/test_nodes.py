"""Which node a replica is started on."""

from __future__ import annotations

from actors.runtime.hosts import ClusterNode, choose_node, head_node

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
