"""Copies on a stream: which memory they move, when they count as done, and that nothing is lost or changed.

Without a GPU the stream is one that runs what it is given when a caller waits for it, so later than anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.common.gpu_models import model_config, random_weights
from benchmarks.common.stand_in_gpu import PoolShape
from farsight.core.request import Residency
from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.devices import copiers
from farsight.engine.devices.copiers import StreamCopier, host_blocks
from farsight.engine.kv_pool import KVPool
from farsight.engine.steps.backends import GraphBackend
from farsight.engine.steps.model_runner import ModelRunner
from farsight.engine.steps.recording import Capture
from farsight.kvcache import KVCopy
from tests.gpu.moving import MovingDriver, wander
from tests.unit.engine.driver import Driver

CONFIG = PoolShape(head_dim=4, num_key_value_heads=2, num_hidden_layers=3)
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
    copier = StreamCopier(device, host_blocks(device, 6), Stream())
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
    copier = StreamCopier(device, host_blocks(device, 4), stream)
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
    copier = StreamCopier(device, host_blocks(device, 2), Stream())
    copier.begin(KVCopy(1, Residency.HOST, (1,), (5,)))
    copier.begin(KVCopy(2, Residency.HOST, (1,), (1,)))
    done: list[tuple[int, bool]] = []
    while len(done) < 2:
        copier.wait()
        done += copier.take_done()
    assert sorted(done) == [(1, True), (2, False)]
    assert "copy 1 failed" in caplog.text


def test_sequences_that_are_moved_about_answer_as_if_they_were_not(tmp_path: Path) -> None:
    """What the tests on a GPU do a thousand times, a few times without one."""
    config = model_config("tiny", tmp_path, num_hidden_layers=2, hidden_size=64, intermediate_size=96, head_dim=8)
    weights = random_weights(config, torch.float32, "cpu")
    runners, sizes = [], StepSizes(8, 16)
    for _ in range(2):
        pool = KVPool(config, num_blocks=80, block_size=32, dtype=torch.float32)
        backend = GraphBackend(
            config, weights, pool, 512, TorchAttention([None] * 2), sizes, cast(Capture, lambda run: run), lambda: None
        )
        runners.append(ModelRunner(config, pool, backend, 512))
    copier = StreamCopier(runners[0].pool, host_blocks(runners[0].pool, 80), Stream())
    events = wander(MovingDriver(runners[0], copier, 80), Driver(runners[1]), 60)
    assert min(events.values()) > 5
