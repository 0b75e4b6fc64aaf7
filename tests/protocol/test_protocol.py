"""Hundreds of seeds of the whole protocol: a bad network, and components that are killed, hang and come back.

A failing seed prints its story; ``PROTOCOL_SEED=17 pytest tests/protocol`` replays it alone.
``make test`` lives through 100 seeds, ``make test-nightly`` through 10,000.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.protocol.faults import plan_faults
from tests.protocol.world import World

NUM_SEEDS = 100
NIGHTLY_SEEDS = 10_000
CHUNK = 50

MUST_HAPPEN = (
    "resumes",
    "resumed with tokens",
    "take-overs with sequences",
    "adoptions",
    "fenced attempts",
    "stalls",
    "preemptions",
    "dead ingresses",
    "silent ingresses that live",
    "refusals",
    "steps beyond grants",
    "starts from the cache",
    "whole copies to HOST",
    "whole copies to DEVICE",
    "failed copies to HOST",
    "failed copies to DEVICE",
    "kills of a worker",
    "kills of a scheduler",
    "kills of a router",
    "kills of a ingress",
    "kills of a manager",
    "orders",
    "orders refused",
    "broken batches",
    "batches of several",
    "batches that ended whole",
    "static batches with padding",
    "static batches returned",
    "snapshots of a cache",
    "prefix trees that agree",
    "recalls",
    "recalls that came too late",
    "recalled requests that are gone",
    "lost recalls",
    "drains",
    "blocks that came back",
    "blocks that were damaged",
)


def live(seed: int) -> Counter[str]:
    """One world; returns what happened in it.

    Raises:
        AssertionError: an invariant broke; tells the story.
    """
    try:
        return _live(World(seed))
    except Exception as error:
        world = World(seed, recording=True)
        try:
            _live(world)
        except Exception:
            command = f"PROTOCOL_SEED={seed} pytest tests/protocol"
            story = f"seed {seed}\n{world.tale()}\n{world.clock.now:8.3f} BROKEN       {error}\nreplay: {command}"
            raise AssertionError(story) from error
        raise RuntimeError(f"seed {seed} broke ({error}) but not when told again: it is not deterministic") from error


def _live(world: World) -> Counter[str]:
    plan_faults(world)
    world.run()
    return world.counts


def live_all(seeds: range) -> tuple[Counter[str], list[str]]:
    """What happened in these worlds, and the stories of those that broke."""
    logging.getLogger("farsight.engine.worker").setLevel(logging.CRITICAL)  # steps break here on purpose
    counts: Counter[str] = Counter()
    broken = []
    for seed in seeds:
        try:
            happened = live(seed)
        except AssertionError as error:
            broken.append(str(error))
            continue
        slowest = max(counts["slowest drain"], happened.pop("slowest drain"))
        counts += happened
        counts["slowest drain"] = slowest
    return counts, broken


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_seeds", [NUM_SEEDS, pytest.param(NIGHTLY_SEEDS, marks=pytest.mark.nightly)])
def test_every_request_gets_its_tokens_once_and_one_end_whatever_dies(num_seeds: int) -> None:
    only = os.environ.get("PROTOCOL_SEED")
    if only:
        _, broken = live_all(range(int(only), int(only) + 1))
        assert not broken, broken[0]
        return
    chunks = [range(first, min(first + CHUNK, num_seeds)) for first in range(0, num_seeds, CHUNK)]
    counts: Counter[str] = Counter()
    broken = []
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        for happened, stories in processes.map(live_all, chunks):
            counts += happened
            broken += stories
    assert not broken, f"{len(broken)} of {num_seeds} seeds broke; the first:\n{broken[0]}"
    missing = [what for what in MUST_HAPPEN if not counts[what]]
    assert not missing, f"never happened: {missing}; what did: {counts}"
