"""Every family over several ranks, as threads that exchange what processes would: the logits of the whole model."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError
from farsight.engine.attention.layout import fill_rows, layout_of
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.weights import load_weights
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.model import DecoderModel
from farsight.engine.parallel.exchange import Arrival, Exchange, RankGroup
from farsight.engine.parallel.mesh import Mesh, Part
from farsight.engine.parallel.shards import load_shard
from farsight.engine.parallel.stage import make_stage
from farsight.engine.parallel.wire import StepOrder
from farsight.engine.sequence import Sequence
from farsight.kvcache import StepItem
from tests.unit.engine.families.shapes import FAMILIES, UNEVEN
from tests.unit.engine.small_models import save_model

CONTEXT = 64
NUM_BLOCKS = CONTEXT // 4
ENGINE = EngineConfig(block_size=4, max_batch_tokens=CONTEXT, max_num_seqs=2, num_threads=1, backend="torch")
STEPS = ((0, 30), (30, 14), (44, 1), (45, 1))
"""Start and length of what each step computes of the one sequence."""

COLUMNS, STAGES, BOTH = Mesh(2, 1), Mesh(1, 2), Mesh(2, 2)
WHOLE_EXPERTS = Mesh(2, 2, whole_experts=True)

ONE_COLUMN = {
    *("olmo2", "olmoe", "bloom", "bloom of 6 heads", "gpt2", "gptj", "gptj whole heads", "gpt_neox"),
    *("gpt_neox in sequence", "falcon 7b", "falcon 40b", "falcon of 11b", "falcon in sequence", "cohere", "cohere2"),
    *("deepseek v2", "deepseek v2 lite", "deepseek v3", "glm", "glm4"),
    *("olmo3", "ernie 4.5", "ernie 4.5 moe"),
}
"""Families whose layers are not split."""

STACKED = {"gpt-oss", "granite moe"}
"""Families that keep all experts in one tensor."""

MIXTURES = {name for name in FAMILIES if any("experts" in field for field in FAMILIES[name])} - ONE_COLUMN - UNEVEN


class Wires:
    """What the ranks of a mesh hand to each other in this process."""

    def __init__(self, mesh: Mesh) -> None:
        self.barriers = [threading.Barrier(mesh.tensor, timeout=120) for _ in range(mesh.pipeline)]
        self.parts: list[list[Tensor]] = [[torch.empty(0)] * mesh.tensor for _ in range(mesh.pipeline)]
        self.sent = [[queue.Queue[Tensor]() for _ in range(mesh.tensor)] for _ in range(mesh.pipeline)]


class ThreadGroup:
    """As ``RankGroup``, for the ranks of a mesh that are threads."""

    def __init__(self, wires: Wires, part: Part) -> None:
        self._wires, self._stage, self._column = wires, part.stage, part.column

    def _share(self, own: Tensor) -> list[Tensor]:
        parts, barrier = self._wires.parts[self._stage], self._wires.barriers[self._stage]
        barrier.wait()
        parts[self._column] = own.clone()
        barrier.wait()
        return list(parts)

    def add_up(self, partial: Tensor) -> None:
        partial.copy_(torch.stack(self._share(partial)).sum(0))

    def gather(self, share: Tensor, shares: list[Tensor] | None) -> None:
        for target, found in zip(shares or [], self._share(share), strict=False):
            target.copy_(found)

    def send(self, hidden: Tensor) -> None:
        self._wires.sent[self._stage + 1][self._column].put(hidden.clone())

    def receive(self, buffer: Tensor) -> Arrival:
        sent = self._wires.sent[self._stage][self._column]

        class Work:
            def wait(self) -> None:
                buffer.copy_(sent.get(timeout=120))

        return Arrival(buffer, Work())


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(name: str) -> Path:
        return save_model(tmp_path_factory.mktemp("family"), **FAMILIES[name])

    return make


def orders() -> list[StepOrder]:
    tokens = torch.randint(3, 256, (CONTEXT,), generator=torch.Generator().manual_seed(5)).tolist()
    sequence = cast(Sequence, SimpleNamespace(token_ids=tokens, images=None, first_row=0))
    found = []
    for start, count in STEPS:
        item = StepItem("one", start, count, True, list(range(-(-(start + count) // ENGINE.kv_block_size))))
        found.append(StepOrder([item], fill_rows([item], {"one": sequence}, ENGINE.kv_block_size), []))
    return found


@torch.inference_mode()
def whole_logits(model_dir: Path) -> list[Tensor]:
    config = load_model_config(model_dir)
    model = DecoderModel(config, load_weights(model_dir, config, torch.float32), CONTEXT)
    pool = KVPool(config, num_blocks=NUM_BLOCKS, block_size=ENGINE.kv_block_size, dtype=torch.float32)
    attention, found = TorchAttention.of_model(config), []
    for order in orders():
        layout = layout_of(order.items, order.rows, pool.block_size, pool.device, order.more_rows)
        pool.clear_blocks(layout.opened_blocks)
        found.append(model.forward(layout, pool, attention.begin_step(layout, pool)))
    return found


def rank_logits(model_dir: Path, mesh: Mesh) -> list[Tensor]:
    config, wires = load_model_config(model_dir), Wires(mesh)
    mesh.check(config)

    def run(rank: int) -> list[Any]:
        part = Part(config, mesh, rank)
        weights = load_shard(model_dir, part, torch.float32)
        pool = KVPool(part.config, num_blocks=NUM_BLOCKS, block_size=ENGINE.kv_block_size, dtype=torch.float32)
        exchange = Exchange(cast(RankGroup, ThreadGroup(wires, part)), part, ENGINE, torch.float32)
        stage, outcomes = make_stage(part, weights, pool, exchange, ENGINE, CONTEXT), []
        for order in orders():
            stage.begin(order)
            outcomes.append(stage.finish())
        return outcomes

    with ThreadPoolExecutor(mesh.size) as ranks:
        outcomes = list(ranks.map(run, range(mesh.size)))
    assert [outcome.report.failure for rank in outcomes for outcome in rank] == [""] * mesh.size * len(STEPS)
    return [outcome.logits for outcome in outcomes[0]]


def meshes(name: str) -> list[Mesh]:
    if name in ONE_COLUMN:
        return [STAGES]
    return [STAGES, *([] if name in STACKED else [BOTH]), *([WHOLE_EXPERTS] if name in MIXTURES else [])]


@pytest.mark.parametrize(
    ("name", "mesh"), [(name, mesh) for name in FAMILIES if name not in UNEVEN for mesh in meshes(name)], ids=str
)
def test_ranks_compute_what_the_whole_model_does(name: str, mesh: Mesh, family: Callable[[str], Path]) -> None:
    for found, expected in zip(rank_logits(family(name), mesh), whole_logits(family(name)), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", sorted(ONE_COLUMN))
def test_layers_that_cannot_be_split_are_refused(name: str, family: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel: got 2, expected 1 \(.*model\.pipeline_parallel"):
        COLUMNS.check(load_model_config(family(name)))


@pytest.mark.parametrize("name", sorted(STACKED))
def test_experts_in_one_tensor_are_spread_as_a_whole(name: str, family: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"expert_parallel: got False, expected true"):
        COLUMNS.check(load_model_config(family(name)))


def test_each_expert_is_on_one_column(family: Callable[[str], Path]) -> None:
    config = load_model_config(family("qwen3 moe"))
    parts = [Part(config, Mesh(2, 1, whole_experts=True), rank) for rank in range(2)]
    assert [part.experts for part in parts] == [range(5), range(5, 9)]
    weights = [load_shard(family("qwen3 moe"), part, torch.float32).layers[1].experts for part in parts]
    assert [len(own.up) for own in weights if own is not None] == [5, 4]
    assert [len(own.router.weight) for own in weights if own is not None] == [9, 9]


def test_experts_that_cannot_be_spread_are_refused(family: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="false for a model without experts"):
        Mesh(2, 1, whole_experts=True).check(load_model_config(family("llama")))
    with pytest.raises(ConfigError, match="at most the model's 5 experts"):
        Mesh(6, 1, whole_experts=True).check(load_model_config(family("mixtral")))
