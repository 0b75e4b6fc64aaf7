"""Sequences that are moved about while they run: to the host and back, or dropped and computed again."""

from __future__ import annotations

import random

import torch

from farsight.core.request import Residency
from farsight.engine.devices.copiers import StreamCopier
from farsight.engine.runner import Copies
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import KVCopy
from tests.unit.engine.driver import Driver


class MovingDriver(Driver):
    """A driver that can also offload, upload and preempt.

    Every block that is given up is filled with NaN, so that nothing is right by accident.

    Args:
        copier: Between the pool of the driver's runner and so many host blocks.
    """

    def __init__(self, runner: ModelRunner, copier: StreamCopier, num_host_blocks: int, seed: int = 0) -> None:
        super().__init__(runner, seed)
        self._copier = copier
        self._host_free = list(range(num_host_blocks))
        self._on_host: dict[str, list[int]] = {}
        self._num_copies = 0
        self._rng = random.Random(seed)

    def is_on_host(self, name: str) -> bool:
        return name in self._on_host

    def offload(self, name: str) -> None:
        source = self._tables[name]
        target = [self._host_free.pop() for _ in source]
        self._copy(Residency.HOST, source, target)
        self._on_host[name] = target
        self._give_up(name)

    def upload(self, name: str) -> None:
        source = self._on_host.pop(name)
        target = [self._free.pop() for _ in source]
        self._copy(Residency.DEVICE, source, target)
        self._host_free += source
        self._tables[name] = target

    def preempt(self, name: str) -> None:
        self._give_up(name)
        self.computed[name] = 0

    @torch.inference_mode()
    def _give_up(self, name: str) -> None:
        pool = self.runner.pool
        for block in self._tables[name]:
            for cache in (*pool.keys, *pool.values):
                cache[block * pool.block_size : (block + 1) * pool.block_size] = float("nan")
        self._free += self._tables[name]
        self._rng.shuffle(self._free)
        self._tables[name] = []

    def _copy(self, to: Residency, source: list[int], target: list[int]) -> None:
        self._num_copies += 1
        self._copier.begin(KVCopy(self._num_copies, to, tuple(source), tuple(target)))
        assert finish(self._copier) == [(self._num_copies, False)]


def finish(copies: Copies) -> list[tuple[int, bool]]:
    """Waits for the copy in flight."""
    copies.wait()
    return copies.take_done()


def wander(driver: MovingDriver, undisturbed: Driver, num_events: int, seed: int = 0) -> dict[str, int]:
    """Steps and events in random order; every token is the one of a run without any event.

    Returns:
        How many events of each kind there were.
    """
    rng = random.Random(seed)
    events = {"offload": 0, "upload": 0, "preempt": 0}
    names = [f"s{i}" for i in range(10)]
    for name in names:
        prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, 150))]
        for one in (driver, undisturbed):
            one.add(name, prompt, max_new_tokens=10**6)
    while sum(events.values()) < num_events:
        name = rng.choice(names)
        here = [each for each in names if not driver.is_on_host(each)]
        if driver.is_on_host(name):
            driver.upload(name)
            events["upload"] += 1
        elif driver.computed[name] and rng.random() < 0.7:
            driver.offload(name)
            events["offload"] += 1
        elif driver.computed[name]:
            driver.preempt(name)
            events["preempt"] += 1
        chosen = [each for each in here if not driver.is_on_host(each) and rng.random() < 0.7]
        if not chosen:
            continue
        work = {each: min(driver.remaining(each), rng.choice((1, 40, 200))) for each in chosen}
        _step_both(driver, undisturbed, work)
        for each in chosen:  # a sequence that has come far ends, and begins again
            if len(driver.sequences[each].token_ids) > 250:
                prompt = list(driver.sequences[each].request.prompt_ids)
                for one in (driver, undisturbed):
                    one.remove(each)
                    one.add(each, prompt, max_new_tokens=10**6)
    return events


def _step_both(driver: Driver, undisturbed: Driver, work: dict[str, int]) -> None:
    """What samples here is computed there as well, and must be the same."""
    found = dict(zip(work, driver.step(**work), strict=True))
    sampled = [name for name, token in found.items() if token is not None]
    for name in sampled:
        before = len(driver.sequences[name].token_ids) - 1
        assert len(undisturbed.sequences[name].token_ids) == before
    if not sampled:
        return
    expected = undisturbed.step(**{name: undisturbed.remaining(name) for name in sampled})
    for name, token in zip(sampled, expected, strict=True):
        assert found[name] == token, f"{name}: {found[name]} instead of {token}"
