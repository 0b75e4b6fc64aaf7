"""What the tests on a GPU do a thousand times, a few times without one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import torch

from benchmarks.common.gpu_models import model_config, random_weights
from engine.attention.step_sizes import StepSizes
from engine.attention.torch_attention import TorchAttention
from engine.kv.copiers import HostBlocks, StreamCopier
from engine.kv.kv_pool import KVPool
from engine.steps.backends import GraphBackend
from engine.steps.decode_graphs import Capture
from engine.steps.model_runner import ModelRunner
from tests.gpu.moving import MovingDriver, wander
from tests.unit.engine.driver import Driver


class Immediate:
    def after_steps(self) -> nullcontext[None]:
        return nullcontext()

    def mark(self):
        return lambda: None


def test_sequences_moved_about(tmp_path) -> None:
    config = model_config("tiny", tmp_path, num_hidden_layers=2, hidden_size=64, intermediate_size=96, head_dim=8)
    weights = random_weights(config, torch.float32, "cpu")
    runners, sizes = [], StepSizes(8, 16)
    for _ in range(2):
        pool = KVPool(config, num_blocks=80, block_size=32, dtype=torch.float32)
        backend = GraphBackend(
            config, weights, pool, 512, TorchAttention([None] * 2), sizes, cast(Capture, lambda run: run), lambda: None
        )
        runners.append(ModelRunner(config, pool, backend, 512))
    copier = StreamCopier(runners[0].pool, HostBlocks(runners[0].pool, 80), Immediate())
    events = wander(MovingDriver(runners[0], copier, 80), Driver(runners[1]), 60)
    assert min(events.values()) > 5
