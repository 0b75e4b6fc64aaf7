"""The compiled step gives a token the same logits, keys and values to the bit, in any company (ADR 27)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from core.request import Request, SamplingParams
from engine.attention.layout import order_items
from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.weights import load_weights
from engine.sequence import Sequence
from engine.steps.model_runner import ModelRunner
from kvcache import StepBatch, StepItem
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.native.exact_step import ExactStep
from tests.unit.engine.small_models import SHAPES, save_model

BLOCK_SIZE = 16
DTYPES = ["float32", "bfloat16"]
ODD = {"hidden_size": 66, "intermediate_size": 90, "num_attention_heads": 3, "head_dim": 16}
MODELS = {
    **{name: SHAPES[name] for name in ("mha", "gqa", "mqa", "biases", "mistral", "qwen3", "phi3", "opt", "opt_gelu")},
    "odd": {**ODD, "num_key_value_heads": 1},
    "odd_mha": {**ODD, "num_key_value_heads": 3},
    "experts": FAMILIES["qwen3 moe"],
    "shared_experts": FAMILIES["qwen2 moe"],
    "long_window": {"architecture": "MistralForCausalLM", "num_key_value_heads": 2, "sliding_window": 140},
}
BY_DAY_IN_BFLOAT16 = ("gqa", "odd", "experts")


def each_in(shapes: Iterable[str]) -> list[ParameterSet]:
    """Each shape in float32, and in bfloat16 by night but for three that reach every branch of the conversions."""
    found = []
    for shape in shapes:
        marks = [] if shape in BY_DAY_IN_BFLOAT16 else [pytest.mark.nightly]
        found += [pytest.param(shape, "float32"), pytest.param(shape, "bfloat16", marks=marks)]
    return found


LENGTHS = (161, 130, 65, 37, 33, 16, *range(1, 13), *range(1, 16))
"""33 sequences; the softmax is corrected once in the first two."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_model(tmp_path_factory.mktemp(name), **({"num_hidden_layers": 2} | shape))
        for name, shape in MODELS.items()
    }


class Components:
    """Sequences of known tokens, computed in whatever portions; every row's logits are kept.

    Args:
        seed: Decides the places of the blocks and the cuts.
        spare: Blocks beyond those that are needed: the context's length, so the table of angles, is another too.
        num_threads: Threads that compute the step.
        bits: What the weights are rounded to; 0 leaves them.
        kv_dtype: As ``engine.kv_dtype``.
    """

    def __init__(
        self,
        model: Path,
        dtype: str,
        tokens: list[list[int]],
        seed: int,
        spare: int = 0,
        num_threads: int = 1,
        bits: int = 0,
        kv_dtype: str = "auto",
    ) -> None:
        self._rng = random.Random(seed)
        self._sequences = {str(i): _sequence(str(i), ids) for i, ids in enumerate(tokens)}
        num_blocks = sum(-(-len(ids) // BLOCK_SIZE) for ids in tokens) + spare
        kind = getattr(torch, dtype)
        self.runner = ModelRunner.from_dir(
            model,
            dtype=kind,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            backend="native",
            num_threads=num_threads,
            bits=bits,
            kv_dtype=kv_dtype,
        )
        for cache in (*self.runner.pool.keys, *self.runner.pool.values):
            cache.view(torch.uint8).fill_(255)  # NaN, also as scales of integers
        free = list(range(num_blocks))
        self._rng.shuffle(free)
        self.tables = {
            name: [free.pop() for _ in range(-(-len(sequence.token_ids) // BLOCK_SIZE))]
            for name, sequence in self._sequences.items()
        }
        self.done = dict.fromkeys(self._sequences, 0)
        self.logits: dict[str, list[Tensor]] = {name: [] for name in self._sequences}

    def left(self, name: str) -> int:
        return len(self._sequences[name].token_ids) - self.done[name]

    def step(self, work: dict[str, int], *, every_row: bool = True) -> None:
        """The next so many tokens of each.

        Args:
            every_row: Whether the logits of all rows are wanted, or only those of each sequence's last token.
        """
        items = tuple(
            StepItem(name, self.done[name], count, self.left(name) == count, self.tables[name])
            for name, count in work.items()
        )
        batch = StepBatch(items)
        order = order_items(batch)
        owners = [items[i].request_id for i in order for _ in range(items[i].num_tokens)]
        sampling = {sum(items[j].num_tokens for j in order[: place + 1]) - 1: i for place, i in enumerate(order)}
        more = [row for row in range(len(owners)) if row not in sampling or not items[sampling[row]].samples]
        if not every_row:
            owners = [items[i].request_id for i in order if items[i].samples]
        logits = self.runner.backend.run(batch, order, self._sequences, more if every_row else None).logits
        for name, row in zip(owners, logits.clone(), strict=True):
            self.logits[name].append(row)
        for name, count in work.items():
            self.done[name] += count

    def run_alone(self) -> Components:
        """One token at a time, one sequence after the other."""
        for name in self._sequences:
            while self.left(name):
                self.step({name: 1})
        return self

    def run(self, most_at_once: int, chunk: int) -> Components:
        """Steps of so many sequences at most, each with one token or a chunk of the size given."""
        while names := [name for name in self._sequences if self.left(name)]:
            chosen = self._rng.sample(names, min(self._rng.randint(1, most_at_once), len(names)))
            self.step({name: min(self._rng.choice((1, chunk, chunk)), self.left(name)) for name in chosen})
        return self

    def kv(self, name: str) -> list[Tensor]:
        """Keys and values of all layers by position, ``[tokens, kv_heads, head_dim]``; in 8 bits the integers, then the
        scales ``[tokens, kv_heads]``. The layouts are in kv_plain.h and kv_int8.h.
        """
        pool, num_tokens = self.runner.pool, len(self._sequences[name].token_ids)
        head_dim = self.runner.config.head_dim
        per_lane = 1 if pool.dtype == torch.float32 else 2
        found, scales = [], []
        for is_key, cache in [(True, each) for each in pool.keys] + [(False, each) for each in pool.values]:
            kv_heads = cache.shape[1]
            blocks = cache.reshape(pool.num_blocks, kv_heads, -1)[self.tables[name]]
            if pool.dtype == torch.int8:
                of_blocks = blocks[..., BLOCK_SIZE * head_dim :].contiguous().view(torch.float32)
                scales.append(of_blocks.transpose(1, 2).reshape(-1, kv_heads)[:num_tokens])
                blocks = blocks[..., : BLOCK_SIZE * head_dim]
            if is_key:
                parts = blocks.reshape(len(blocks), kv_heads, head_dim // per_lane, BLOCK_SIZE, per_lane)
                parts = parts.permute(0, 3, 1, 2, 4)
            else:
                parts = blocks.reshape(len(blocks), kv_heads, BLOCK_SIZE // per_lane, head_dim, per_lane)
                parts = parts.permute(0, 2, 4, 1, 3)
            found.append(parts.reshape(-1, kv_heads, head_dim)[:num_tokens])
        return [*found, *scales]


def _sequence(name: str, token_ids: list[int]) -> Sequence:
    return Sequence.of(Request(name, 1, "ingress", tuple(token_ids), SamplingParams(1)))


def _random_tokens(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]


def assert_same(ours: Components, alone: Components) -> None:
    for name, expected in alone.logits.items():
        assert torch.equal(torch.stack(ours.logits[name]), torch.stack(expected)), f"logits of sequence {name}"
        for mine, theirs in zip(ours.kv(name), alone.kv(name), strict=True):
            assert torch.equal(mine, theirs), f"keys or values of sequence {name}"


CUTS = [(2, 3), (3, 1), (5, 2), (33, 7), (33, 200)]
"""Sequences of a step at most, tokens of a chunk."""


@pytest.mark.parametrize(("shape", "dtype"), each_in(MODELS))
def test_a_row_does_not_depend_on_what_it_is_computed_with(saved: dict[str, Path], shape: str, dtype: str) -> None:
    """Batches of 1 to 33 sequences, decode rows and chunks, places of blocks: the bits are those of one row."""
    tokens = _random_tokens(LENGTHS)
    alone = Components(saved[shape], dtype, tokens, seed=0).run_alone()
    for seed, cut in enumerate(CUTS, start=1):
        assert_same(Components(saved[shape], dtype, tokens, seed, spare=seed).run(*cut), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [2, 3, 4, 7])
@pytest.mark.parametrize("shape", ["mha", "odd", "experts"])
def test_a_row_does_not_depend_on_the_threads(saved: dict[str, Path], shape: str, num_threads: int, dtype: str) -> None:
    """In few steps: threads of a step wait for each other, which takes long where others use the cores."""
    tokens = _random_tokens(LENGTHS[:12])
    alone = Components(saved[shape], dtype, tokens, seed=0).run_alone()
    threaded = Components(saved[shape], dtype, tokens, seed=1, num_threads=num_threads)
    threaded.step({name: max(1, threaded.left(name) - 1) for name in threaded.done})
    threaded.step({name: 1 for name in threaded.done if threaded.left(name)})
    assert_same(threaded, alone)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("shape", "dtype"), each_in(("gqa", "odd", "biases", "qwen3", "opt", "long_window", "experts"))
)
def test_the_last_layer_computes_queries_of_sampled_rows_alone(
    saved: dict[str, Path], shape: str, num_threads: int, dtype: str
) -> None:
    """The bits of their logits, and of all keys and values, are those of a step that computes all rows."""
    tokens = _random_tokens(LENGTHS[:12])
    every = Components(saved[shape], dtype, tokens, seed=0)
    every.step({name: every.left(name) for name in every.done})
    few = Components(saved[shape], dtype, tokens, seed=1, num_threads=num_threads)
    few.step({name: few.left(name) // 2 for name in few.done if few.left(name) > 1}, every_row=False)
    assert not any(few.logits.values())
    first = dict.fromkeys(["0", "3", "5"], 1) | {name: few.left(name) for name in ("1", "2", "4")}
    few.step(first, every_row=False)
    few.step({name: few.left(name) for name in few.done if few.left(name)}, every_row=False)
    for name, rows in every.logits.items():
        (row,) = few.logits[name]
        assert torch.equal(row, rows[-1]), f"logits of sequence {name}"
        for mine, theirs in zip(few.kv(name), every.kv(name), strict=True):
            assert torch.equal(mine, theirs), f"keys or values of sequence {name}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", range(1, 34))
def test_every_number_of_decode_rows(saved: dict[str, Path], num_rows: int, dtype: str) -> None:
    tokens = _random_tokens((3,) * num_rows)
    together = Components(saved["gqa"], dtype, tokens, seed=1)
    for _ in range(3):
        together.step(dict.fromkeys(together.done, 1))
    assert_same(together, Components(saved["gqa"], dtype, tokens, seed=2).run_alone())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_that_another_request_has_computed(saved: dict[str, Path], dtype: str) -> None:
    """Its blocks are taken over; what follows is as if the sequence had computed them by itself."""
    first, second = _random_tokens((150, 170))
    second[:144] = first[:144]
    alone = Components(saved["gqa"], dtype, [second], seed=0).run_alone()
    shared = Components(saved["gqa"], dtype, [first, second], seed=1)
    while shared.left("0"):
        shared.step({"0": min(11, shared.left("0"))})
    shared.tables["1"][:9] = shared.tables["0"][:9]
    shared.done["1"] = 144
    while shared.left("1"):
        shared.step({"1": min(5, shared.left("1"))})
    assert torch.equal(torch.stack(shared.logits["1"]), torch.stack(alone.logits["0"][144:]))
    for mine, theirs in zip(shared.kv("1"), alone.kv("0"), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    each_in(("gqa", "odd", "biases", "qwen3", "phi3", "opt", "long_window", "experts", "shared_experts")),
)
def test_the_roundings_are_those_of_the_contract(saved: dict[str, Path], shape: str, dtype: str) -> None:
    """Not only always the same: the bits are those that the ADR promises."""
    (tokens,) = _random_tokens((150,))
    model = saved[shape]
    config = load_model_config(model)
    exact = ExactStep(config, load_weights(model, config, getattr(torch, dtype)), len(tokens))
    ours = Components(model, dtype, [tokens], seed=0).run(1, 41)
    assert np.array_equal(torch.stack(ours.logits["0"]).numpy(), exact.logits(tokens))
