"""The partition of prefixes that is fixed in advance."""

from __future__ import annotations

import random

import pytest

from core.errors import InvalidValueError
from core.request import Request, SamplingParams
from policies.placement.base import ReplicaLoad
from policies.placement.oracle_partition import OraclePartition

REQUEST = Request("r", 0, "i", (1,), SamplingParams(1))


def owner(policy: OraclePartition, prefix: tuple[int, ...], names: str = "abc") -> str:
    return policy.choose(REQUEST, prefix, tuple(ReplicaLoad(name, 0, 0.0) for name in names), 0.0).replica


def test_the_heaviest_goes_to_the_lightest_first() -> None:
    policy = OraclePartition({10: 5.0, 11: 4.0, 12: 3.0, 13: 3.0, 14: 3.0}, 2, 64)
    assert [owner(policy, (first, 99), "ab") for first in (10, 11, 12, 13, 14)] == ["a", "b", "b", "a", "b"]


def test_whoever_shares_the_first_element_shares_the_replica() -> None:
    policy = OraclePartition({10: 1.0, 11: 1.0, 12: 1.0}, 3, 64)
    assert owner(policy, (11, 1)) == owner(policy, (11,)) == owner(policy, (11, 7, 8)) == "b"


def test_the_unknown_goes_to_the_lightest() -> None:
    policy = OraclePartition({10: 5.0, 11: 1.0, 12: 2.0}, 3, 64)
    assert owner(policy, (99,)) == owner(policy, ()) == owner(policy, (11,)) == "c"


def test_fewer_replicas_share_what_more_would_have() -> None:
    policy = OraclePartition({10: 3.0, 11: 2.0, 12: 1.0}, 3, 64)
    assert [owner(policy, (first,), "ab") for first in (10, 11, 12)] == ["a", "b", "a"]


def test_what_all_prompts_share_tells_nothing() -> None:
    policy = OraclePartition({10: 3.0, 11: 2.0, 12: 1.0}, 3, 64, num_leading=1)
    assert [owner(policy, (7, first)) for first in (10, 11, 12)] == ["a", "b", "c"]
    assert owner(policy, (10,)) == owner(policy, (7, 99)) == "c", "unknown"


@pytest.mark.parametrize("seed", range(5))
def test_no_replica_has_more_than_the_mean_and_one_prefix(seed: int) -> None:
    rng = random.Random(seed)
    loads = {i: rng.paretovariate(1.1) for i in range(60)}
    policy = OraclePartition(loads, 3, 64)
    totals = dict.fromkeys("abc", 0.0)
    for first, load in loads.items():
        totals[owner(policy, (first,))] += load
    assert max(totals.values()) <= sum(loads.values()) / 3 + max(loads.values())


@pytest.mark.parametrize(("replicas", "block_size", "field"), [(0, 1, "num_replicas"), (1, 0, "block_size")])
def test_bad_parameters_are_named(replicas: int, block_size: int, field: str) -> None:
    with pytest.raises(InvalidValueError, match=field):
        OraclePartition({}, replicas, block_size)
