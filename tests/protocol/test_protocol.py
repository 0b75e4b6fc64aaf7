"""Thousands of seeds of the protocol in a bad network.

A failing seed prints its story; ``PROTOCOL_SEED=17 pytest tests/protocol`` replays it alone.
"""

from __future__ import annotations

import os

import pytest

from tests.protocol.world import World

NUM_SEEDS = 1000
NUM_CHUNKS = 10
NUM_REQUESTS = 12
BUSY_S = 1.0
MAX_DRAIN_S = 120.0  # virtual: far more than any of these worlds needs
SETTLE_S = 2.0  # virtual: for acknowledgements and the last plan


def live(seed: int) -> None:
    """One world from its first request until nothing is left of the last."""
    world = World(seed)
    for i in range(NUM_REQUESTS):
        world.clock.after(world.rng.uniform(0, BUSY_S), lambda i=i: world.submit(f"r{i}"))  # type: ignore[misc]
        if world.rng.random() < 0.4:
            world.clock.after(world.rng.uniform(0, BUSY_S * 1.5), world.leave)
    try:
        while world.clock.now < 2 * BUSY_S or not world.drained:
            world.clock.step()
            assert world.clock.now < MAX_DRAIN_S, "it does not drain: somebody starves"
        settled = world.clock.now + SETTLE_S
        while world.clock.now < settled:
            world.clock.step()
        world.check_end()
    except Exception as error:
        story = "\n".join(world.story)
        raise AssertionError(f"seed {seed}: {error}\n{story}\nreplay: PROTOCOL_SEED={seed}") from error


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_request_gets_its_tokens_once_and_one_end_whatever_the_network_does(chunk: int) -> None:
    only = os.environ.get("PROTOCOL_SEED")
    seeds = [int(only)] if only else range(chunk, NUM_SEEDS, NUM_CHUNKS)
    for seed in seeds:
        live(seed)
