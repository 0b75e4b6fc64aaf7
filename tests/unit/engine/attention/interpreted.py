"""xformers' kernels on CPU tensors, in Triton's interpreter, against the torch backend; whole models on these and on
our own. ``test_fused.py`` runs them.

The interpreter must be asked for before Triton is imported, and then serves the whole process, so these tests have a
process of their own. What runs here is the real split-K kernel for decode and for pages. Causal attention of a prompt
to itself is flash attention on a GPU, which has no CPU kernel: an operator written out in torch stands in its place,
behind xformers' own calls, with xformers' own mask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from xformers.ops.fmha import attn_bias, triton_splitk
from xformers.ops.fmha.common import AttentionFwOpBase, Context

from benchmarks.common.gpu_models import model_config, random_weights, save_random_checkpoint
from farsight.core.config.engine import EngineConfig
from farsight.engine.attention import xformers_attention
from farsight.engine.attention.attention import AttentionBackend, StaticDecode
from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.attention.triton_attention import TritonAttention
from farsight.engine.attention.xformers_attention import (
    EXTENSION_REASON,
    Operators,
    SmallScratch,
    WithoutExtension,
    XformersAttention,
    gpu_operators,
    operator_problem,
    round_up,
)
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.weights import LayerWeights, load_weights
from farsight.engine.kv_pool import KVPool
from farsight.engine.models import model
from farsight.engine.models.fused_layers import FusedLayers
from farsight.engine.parallel import stage
from farsight.engine.parallel.device import load_parallel_device
from farsight.engine.parallel.follower import follow
from farsight.engine.parallel.links import Gathering, Ranks, Ticket, join
from farsight.engine.parallel.mesh import Mesh, Part
from farsight.engine.steps.backends import TorchBackend
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.attention.paged_step import PAGE, PagedStep
from tests.unit.engine.driver import Driver

TOLERANCE = 2e-3
SIZES = StepSizes(6, 4)


class InterpretedSplitK(SmallScratch, triton_splitk.FwOp):
    SUPPORTED_DEVICES = frozenset({"cpu"})


class InterpretedPages(triton_splitk.FwOp_S1):
    SUPPORTED_DEVICES = frozenset({"cpu"})


class WrittenOut(AttentionFwOpBase):
    """Causal attention of chunks to themselves, operation by operation, in float32."""

    OPERATOR = True
    SUPPORTED_DEVICES = frozenset({"cpu"})
    SUPPORTED_DTYPES = frozenset({torch.half})
    SUPPORTED_MAX_K = 512
    SUPPORTED_ATTN_BIAS_TYPES = (attn_bias.BlockDiagonalCausalMask,)
    SUPPORTS_DROPOUT = False
    SUPPORTS_PARTIAL = True
    SUPPORTS_BMGHK = True
    NAME = "written-out"

    @classmethod
    def apply(cls, inp, needs_gradient: bool):
        query, key, value = (tensor.float() for tensor in (inp.query, inp.key, inp.value))
        mask = inp.attn_bias.materialize((query.shape[1], key.shape[1]))
        scores = torch.einsum("bmghd,bnghd->bghmn", query, key) * query.shape[-1] ** -0.5 + mask
        out = torch.einsum("bghmn,bnghd->bmghd", scores.softmax(-1), value).to(inp.query.dtype)
        return out, Context(out=out, lse=scores.logsumexp(-1))


class OverPages(AttentionFwOpBase):
    """As FlashAttention 3 takes chunks: causal from the end of each sequence, over pages."""

    OPERATOR = True
    SUPPORTED_DEVICES = frozenset({"cpu"})
    SUPPORTED_DTYPES = frozenset({torch.half})
    SUPPORTED_MAX_K = 512
    SUPPORTED_ATTN_BIAS_TYPES = (attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,)
    SUPPORTS_DROPOUT = False
    SUPPORTS_BMGHK = True
    NAME = "over-pages"

    @classmethod
    def apply(cls, inp, needs_gradient: bool):
        bias, outputs = inp.attn_bias, []
        for row, (first, end) in enumerate(bias.q_seqinfo.intervals()):
            length = bias.k_seqinfo.seqlen_py[row]
            positions = torch.arange(length)
            slots = bias.block_tables[row][positions // bias.page_size] * bias.page_size + positions % bias.page_size
            query, key, value = inp.query[0, first:end].float(), inp.key[0, slots].float(), inp.value[0, slots].float()
            scores = torch.einsum("mghd,nghd->ghmn", query, key) * query.shape[-1] ** -0.5
            hidden = positions > positions[length - (end - first) :, None]
            scores = scores.masked_fill(hidden, float("-inf"))
            outputs.append(torch.einsum("ghmn,nghd->mghd", scores.softmax(-1), value))
        return torch.cat(outputs)[None].to(inp.query.dtype), None


OPERATORS = Operators(decode=InterpretedSplitK, pages=InterpretedPages, prompt=WrittenOut)
WITH_CHUNKS = Operators(decode=InterpretedSplitK, pages=InterpretedPages, prompt=WrittenOut, chunks=OverPages)


class Step(PagedStep):
    """Computed by xformers' kernels."""

    def found(self, operators: Operators) -> Tensor:
        attention = XformersAttention(operators, SIZES).begin_step(self.layout, self.pool)
        return attention.attend(0, self.query, self.key, self.value).float()

    def check(self, operators: Operators = OPERATORS) -> None:
        torch.testing.assert_close(self.found(operators), self.expected(), atol=TOLERANCE, rtol=0)


HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
CHUNKS = [(20, 148), (7, 72), (33, 33), (40, 41)]
"""Behind full pages, as after a prefix hit, behind parts of pages, and one that begins its sequence."""

STEPS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "decode of ragged lengths": ([200, 130, 65, 64, 1], []),
    "whole prompts": ([], [(1, 1), (70, 70), (13, 13)]),
    "chunks": ([], CHUNKS),
}


@pytest.mark.parametrize("operators", [OPERATORS, WITH_CHUNKS], ids=["chunks in two parts", "in one call"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("step", STEPS)
def test_kernels_attend_as_torch_does(step: str, heads: str, operators: Operators) -> None:
    Step(*STEPS[step], *HEADS[heads]).check(operators)


@pytest.mark.parametrize("operators", [OPERATORS, WITH_CHUNKS], ids=["two parts", "one call"])
def test_everything_in_one_step(operators: Operators) -> None:
    Step([150, 66, 2], [(19, 90), (5, 5)], 8, 4).check(operators)


def test_other_sizes_of_heads_and_a_page_of_several_kernel_blocks() -> None:
    for dim in (16, 64):
        Step([70, 3], [(5, 69)], 4, 2, dim).check()
    Step([200, 130, 1], [(9, 140)], 4, 2, page=128).check()


def test_the_same_memory_with_other_values() -> None:
    """What a captured step reads is changed in place; what it holds of lengths is nothing."""
    static = StaticDecode(torch.zeros(4, 4, dtype=torch.int32), torch.ones(4, dtype=torch.int32))
    for lengths in ([130, 70, 64, 1], [200, 199, 3, 2]):
        step = Step(lengths, [], 4, 2)
        attention = XformersAttention(OPERATORS, SIZES).begin_static(static, step.pool)
        reference = TorchAttention([None]).begin_static(static, step.exact)
        assert step.layout.decode is not None
        tables = step.layout.decode.block_tables
        static.block_tables[:, : tables.shape[1]] = tables
        static.kv_lens.copy_(torch.tensor(lengths))
        expected = step.expected()
        found = attention.attend(0, step.query, step.key, step.value).float()
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        found = reference.attend(0, step.query.float(), step.key.float(), step.value.float())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_what_xformers_says_against_a_kernel() -> None:
    step = Step([5], [], 8, 4)
    config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    assert operator_problem(OPERATORS, config, step.pool) is None  # type: ignore[arg-type]
    gpu_only = Operators(triton_splitk.FwOp, InterpretedPages, WrittenOut)
    assert "device=cpu" in (operator_problem(gpu_only, config, step.pool) or "")  # type: ignore[arg-type]


def test_its_extension_is_not_needed() -> None:
    """The words by which xformers says that it lacks it, and that nothing else is left out."""
    assert EXTENSION_REASON in inspect.getsource(AttentionFwOpBase.not_supported_reasons)

    class Refusing:
        @classmethod
        def not_supported_reasons(cls, inputs: object) -> list[str]:
            return [EXTENSION_REASON, "too old"]

    class Kernel(WithoutExtension, Refusing):
        pass

    assert Kernel.not_supported_reasons(None) == ["too old"]
    chosen = gpu_operators()
    assert issubclass(chosen.decode, WithoutExtension) and issubclass(chosen.prompt, WithoutExtension)
    decode, pages = cast(Any, chosen.decode), cast(Any, chosen.pages)  # xformers declares neither attribute
    assert (decode.MAX_BLOCK_M, pages.SPLIT_K) == (1, 1)


def test_sizes_repeat() -> None:
    assert [round_up(n, 256) for n in (1, 5, 256, 257, 513)] == [1, 8, 256, 512, 768]


def make_fused(
    config: DecoderConfig, layers: Sequence[LayerWeights], max_len: int, like: Tensor, *, compiled: bool
) -> FusedLayers:
    return FusedLayers(config, layers, max_len, like)


def tiny_config(directory: Path, **changes: Any) -> DecoderConfig:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    return model_config("tiny", directory, **shape, **changes)


def make_runners(directory: Path, kernels: str) -> tuple[ModelRunner, ModelRunner]:
    """The same float16 model as on a GPU, with fused layers over kernels, and out of torch operations."""
    config = tiny_config(directory, num_hidden_layers=1, num_key_value_heads=2)
    weights = random_weights(config, torch.float16, "cpu")
    made = []
    for name in (kernels, "torch"):
        pool = KVPool(config, num_blocks=12, block_size=PAGE, dtype=torch.float16)
        attention: AttentionBackend = TorchAttention(config.sliding_windows)
        if name != "torch":
            ours = name == "triton"
            attention = TritonAttention.of_model(config, pool, SIZES) if ours else XformersAttention(OPERATORS, SIZES)
        with pytest.MonkeyPatch.context() as patch:
            if name != "torch":
                patch.setattr(model, "make_layers", make_fused)
            backend = TorchBackend(config, weights, pool, 256, attention)
        made.append(ModelRunner(config, pool, backend, 256))
    return made[0], made[1]


@pytest.mark.parametrize("kernels", ["triton", "xformers"])
def test_logits_of_a_model(kernels: str, tmp_path: Path) -> None:
    """Prompts whole and in chunks, then decode; float16 throughout, so rounding differs a little."""
    ours, reference = (Driver(runner) for runner in make_runners(tmp_path, kernels))
    compare(ours, reference)


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "pipeline"),
    [(2, 2, 1), (2, 1, 2), (1, 2, 2)],  # of the last both columns have the same keys and values
)
def test_ranks_attend_with_their_own_heads(
    tmp_path: Path, kv_heads: int, tensor: int, pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each would on a GPU; its tokens are those of one rank over torch attention, where those are sure."""
    config = tiny_config(tmp_path, num_hidden_layers=2, num_key_value_heads=kv_heads)
    save_random_checkpoint(config, tmp_path, torch.float16)
    weights = load_weights(tmp_path, config, torch.float16)
    pool = KVPool(config, num_blocks=12, block_size=PAGE, dtype=torch.float16)
    reference = ModelRunner(config, pool, TorchBackend(config, weights, pool, 256), 256)
    engine = EngineConfig(block_size=PAGE, kv_memory="1MiB", num_threads=1, max_num_seqs=6, max_batch_tokens=200)
    used = attend_as_on_a_gpu(monkeypatch)
    with forked_ranks(Mesh(tensor, pipeline)) as ranks:
        device = load_parallel_device(
            tmp_path, config, "float16", engine, 1, ranks, swaps=False, counts=lambda *step: True
        )
        assert isinstance(device.runner, ModelRunner)
        compare(Driver(device.runner), Driver(reference))
    assert [type(each) for each in used] == [XformersAttention]


def attend_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[AttentionBackend]:
    """With CPU tensors, in this process and those that it forks; returns what this one's stages are made with."""
    used: list[AttentionBackend] = []
    choose = stage.stage_attention

    def choosing(part: Part, pool: KVPool, engine: EngineConfig, max_len: int) -> AttentionBackend:
        on_gpu = dataclasses.replace(engine, device="cuda", backend="xformers")
        used.append(choose(part, pool, on_gpu, max_len))
        return used[-1]

    monkeypatch.setattr(stage, "stage_attention", choosing)
    monkeypatch.setattr(xformers_attention, "gpu_operators", lambda: OPERATORS)
    return used


@contextlib.contextmanager
def forked_ranks(mesh: Mesh) -> Iterator[Ranks]:
    """Ranks that have imported already what takes seconds to import."""
    gathering = Gathering(mesh.size)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=follow_from_here, args=(gathering.ticket, i)) for i in range(1, mesh.size)]
    for process in processes:
        process.start()
    try:
        yield Ranks(mesh, gathering, on_lost=lambda error: None)
    finally:
        gathering.close()
        for process in processes:
            process.kill()
            process.join()
        if dist.is_initialized():
            dist.destroy_process_group()


def follow_from_here(ticket: Ticket, rank: int) -> None:
    follow(join(ticket, rank), ticket, rank, on_ready=lambda: None, on_lost=lambda: os._exit(1))


def compare(ours: Driver, reference: Driver) -> None:
    """Whole prompts, chunks behind earlier tokens and decode rows; both go on with what the reference has chosen."""
    rng = random.Random(0)
    for name, length in (("a", 3), ("b", 90), ("c", 70)):
        prompt = [rng.randrange(3, 300) for _ in range(length)]
        for driver in (ours, reference):
            driver.add(name, prompt)
    for work in ({"a": 3, "b": 66}, {"c": 70, "b": 24, "a": 1}, {"a": 1, "b": 1, "c": 1}, {"c": 1, "a": 1}):
        for name, found, expected in zip(work, ours.logits(**work), reference.logits(**work), strict=True):
            assert (found is None) == (expected is None)
            if found is None or expected is None:
                continue
            tolerance = 0.01 * expected.abs().max()
            assert (found - expected).abs().max() < tolerance
            best = expected.topk(2)
            assert found.argmax() == best.indices[0] or best.values[0] - best.values[1] < 2 * tolerance
            for driver in (ours, reference):
                driver.sequences[name].token_ids.append(int(best.indices[0]))
