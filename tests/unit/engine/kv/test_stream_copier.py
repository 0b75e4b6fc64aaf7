"""Copies on a stream: which memory they move, when they count as done, and that nothing is lost or changed.

Without a GPU the stream is one that runs what it is given when a caller waits for it, so later than anything else.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from core.request import Residency
from engine.kv import copiers
from engine.kv.copiers import HostBlocks, StreamCopier
from engine.kv.kv_pool import KVPool
from kvcache import KVCopy

CONFIG = SimpleNamespace(kv_rows=2, num_hidden_layers=3, num_key_value_heads=2, head_dim=4)
BLOCK_BYTES = 2 * 3 * 8 * 2 * 4 * 4


class Stream:
    """Copies end when ``open`` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = 0

    def after_steps(self) -> nullcontext[None]:
        self.entered += 1
        return nullcontext()

    def mark(self) -> Callable[[], None]:
        def wait() -> None:
            self.open.wait(120)

        return wait


def pool(num_blocks: int, value: float | None = None) -> KVPool:
    made = KVPool(CONFIG, num_blocks=num_blocks, block_size=8, dtype=torch.float32)  # type: ignore[arg-type]
    for cache in (*made.keys, *made.values):
        cache.normal_() if value is None else cache.fill_(value)
    return made


def contents(held: KVPool, block: int) -> torch.Tensor:
    rows = slice(block * 8, block * 8 + 8)
    return torch.stack([torch.stack([cache[rows] for cache in caches]) for caches in (held.keys, held.values)])


@pytest.mark.parametrize("num_staged", [1, 2, 64])
def test_there_and_back(num_staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copiers, "STAGING_BYTES", num_staged * BLOCK_BYTES + 1)
    device = pool(7)
    before = [contents(device, block) for block in range(7)]
    copier = StreamCopier(device, HostBlocks(device, 6), Stream())
    copier.begin(KVCopy(1, Residency.HOST, (6, 0, 3, 2, 5), (1, 4, 0, 5, 2)))
    copier.begin(KVCopy(2, Residency.DEVICE, (4, 5, 1), (1, 3, 4)))
    copier.begin(KVCopy(3, Residency.DEVICE, (0,), (6,)))
    done: list[tuple[int, bool]] = []
    while len(done) < 3:
        copier.wait()
        done += copier.take_done()
    assert sorted(done) == [(1, False), (2, False), (3, False)]
    now = [contents(device, block) for block in range(7)]
    expected = {0: 0, 1: 0, 2: 2, 3: 2, 4: 6, 5: 5, 6: 3}
    assert all(torch.equal(now[block], before[source]) for block, source in expected.items())


def test_a_copy_is_done_when_the_stream_says_so() -> None:
    device, stream = pool(4), Stream()
    stream.open.clear()
    told = threading.Event()
    copier = StreamCopier(device, HostBlocks(device, 4), stream)
    copier.when_done(told.set)
    copier.begin(KVCopy(7, Residency.HOST, (1, 2), (0, 3)))
    assert copier.take_done() == [] and not told.is_set()
    stream.open.set()
    assert told.wait(120)
    copier.wait()
    assert copier.take_done() == [(7, False)]
    assert copier.take_done() == []
    assert stream.entered == 1


def test_a_copy_that_cannot_be_launched_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    device = pool(4)
    copier = StreamCopier(device, HostBlocks(device, 2), Stream())
    copier.begin(KVCopy(1, Residency.HOST, (1,), (5,)))
    copier.begin(KVCopy(2, Residency.HOST, (1,), (1,)))
    done: list[tuple[int, bool]] = []
    while len(done) < 2:
        copier.wait()
        done += copier.take_done()
    assert sorted(done) == [(1, True), (2, False)]
    assert "copy 1 failed" in caplog.text


def test_a_thousand_moves_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks wander between both pools; each holds what it held at the beginning, wherever it is."""
    monkeypatch.setattr(copiers, "STAGING_BYTES", 3 * BLOCK_BYTES)
    rng = random.Random(2)
    device = pool(12, 0.0)
    copier = StreamCopier(device, HostBlocks(device, 12), Stream())
    held, free = {}, {Residency.DEVICE: list(range(12)), Residency.HOST: list(range(12))}
    for name in range(9):
        block = free[Residency.DEVICE].pop()
        for cache in (*device.keys, *device.values):
            cache[block * 8 : block * 8 + 8] = name + 1
        held[name] = (Residency.DEVICE, block)
    for number in range(1000):
        names = rng.sample(sorted(held), rng.randint(1, 5))
        here = held[names[0]][0]
        there = Residency.HOST if here is Residency.DEVICE else Residency.DEVICE
        names = [name for name in names if held[name][0] is here]
        source = [held[name][1] for name in names]
        target = [free[there].pop(rng.randrange(len(free[there]))) for _ in names]
        copier.begin(KVCopy(number, there, tuple(source), tuple(target)))
        copier.wait()
        assert copier.take_done() == [(number, False)]
        free[here] += source
        held |= {name: (there, block) for name, block in zip(names, target, strict=True)}
        for name, (where, block) in held.items():
            if where is Residency.DEVICE:
                assert (contents(device, block) == name + 1).all()
