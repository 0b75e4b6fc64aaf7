"""The compiled step gives a token the same logits, keys and values to the bit, in any company (ADR 27).

Also with weights in 8 and 4 bits (ADR 42), and with keys and values in 8 bits (ADR 46).
"""

from __future__ import annotations

import functools
import platform
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.quantized import QuantizedLinear
from farsight.engine.checkpoint.weights import Linear, load_weights
from farsight.engine.engine import Engine
from farsight.engine.models.quantize import quantize_weights
from farsight.engine.native import library
from tests.unit.engine.native import exact_step
from tests.unit.engine.native.components import MODELS, Components, assert_same, random_tokens
from tests.unit.engine.native.exact_step import ExactStep
from tests.unit.engine.small_models import save_model

Saved = Callable[[str], Path]

DTYPES = ["float32", "bfloat16"]
BY_DAY_IN_BFLOAT16 = ("gqa", "odd", "heads_of_20", "experts", "latents")


def each_in(shapes: Iterable[str], *more: Any) -> list[ParameterSet]:
    """Each shape in float32, and in bfloat16 by night but for those that reach every branch of the conversions."""
    found = []
    for shape in shapes:
        marks = [] if shape in BY_DAY_IN_BFLOAT16 else [pytest.mark.nightly]
        found += [pytest.param(shape, "float32", *more), pytest.param(shape, "bfloat16", *more, marks=marks)]
    return found


def by_night(*arguments: Any) -> ParameterSet:
    return pytest.param(*arguments, marks=pytest.mark.nightly)


LENGTHS = (161, 130, 65, 37, 33, 16, *range(1, 13), *range(1, 16))
"""33 sequences; the softmax is corrected once in the first two."""


INT8_KV, INT8, INT4 = {"kv_dtype": "int8"}, {"bits": 8}, {"bits": 4}


@functools.cache
def _run_alone(model_dir: Path, dtype: str, lengths: tuple[int, ...], how: tuple[tuple[str, Any], ...]) -> Components:
    return Components(model_dir, dtype, random_tokens(lengths), seed=0, **dict(how)).run_alone()


def each_alone(model_dir: Path, dtype: str, lengths: tuple[int, ...] = LENGTHS, **how: Any) -> Components:
    """One row at a time: what everything else is held against. Fewer sequences are the first of these."""
    return _run_alone(model_dir, dtype, lengths, tuple(how.items()))


CUTS = [(2, 3), (3, 1), (5, 2), (33, 7), (33, 200)]
"""Sequences of a step at most, tokens of a chunk."""


@pytest.mark.parametrize(
    ("shape", "dtype", "how"),
    [
        *each_in((name for name in MODELS if name != "tied"), {}),
        *[(shape, "bfloat16", INT8_KV) for shape in ("mha", "odd", "long_window")],
        *[("gqa", "bfloat16", how) for how in (INT8, INT4)],
    ],
)
def test_a_row_does_not_depend_on_what_it_is_computed_with(
    saved: Saved, shape: str, dtype: str, how: dict[str, Any]
) -> None:
    """Batches of 1 to 33 sequences, decode rows and chunks, places of blocks: the bits are those of one row."""
    tokens, alone = random_tokens(LENGTHS), each_alone(saved(shape), dtype, **how)
    for seed, cut in enumerate(CUTS, start=1):
        threads = 3 if how and seed == len(CUTS) else 1
        ours = Components(saved(shape), dtype, tokens, seed, spare=seed, num_threads=threads, **how)
        assert_same(ours.run(*cut), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [pytest.param(2, marks=pytest.mark.nightly), 3, 7])
@pytest.mark.parametrize("shape", ["mha", "odd", "experts", "latents"])
def test_a_row_does_not_depend_on_the_threads(saved: Saved, shape: str, num_threads: int, dtype: str) -> None:
    """In few steps: threads of a step wait for each other, which takes long where others use the cores."""
    tokens = random_tokens(LENGTHS[:12])
    threaded = Components(saved(shape), dtype, tokens, seed=1, num_threads=num_threads)
    threaded.step({name: max(1, threaded.left(name) - 1) for name in threaded.done})
    threaded.step({name: 1 for name in threaded.done if threaded.left(name)})
    assert_same(threaded, each_alone(saved(shape), dtype))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("shape", "dtype"), each_in(("gqa", "odd", "biases", "qwen3", "opt", "long_window", "experts", "latents"))
)
def test_the_last_layer_computes_queries_of_sampled_rows_alone(
    saved: Saved, shape: str, num_threads: int, dtype: str
) -> None:
    """The bits of their logits, and of all keys and values, are those of steps that compute all rows."""
    tokens, every = random_tokens(LENGTHS[:12]), each_alone(saved(shape), dtype)
    few = Components(saved(shape), dtype, tokens, seed=1, num_threads=num_threads)
    few.step({name: few.left(name) // 2 for name in few.done if few.left(name) > 1}, every_row=False)
    assert not any(few.logits.values())
    first = dict.fromkeys(["0", "3", "5"], 1) | {name: few.left(name) for name in ("1", "2", "4")}
    few.step(first, every_row=False)
    few.step({name: few.left(name) for name in few.done if few.left(name)}, every_row=False)
    for name, (row,) in few.logits.items():
        assert torch.equal(row, every.logits[name][-1]), f"logits of sequence {name}"
        for mine, theirs in zip(few.kv(name), every.kv(name), strict=True):
            assert torch.equal(mine, theirs), f"keys or values of sequence {name}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["gqa", "latents"])
def test_every_number_of_decode_rows(saved: Saved, shape: str, dtype: str) -> None:
    alone = each_alone(saved(shape), dtype, (3,) * 33)
    for num_rows in range(1, 34):
        together = Components(saved(shape), dtype, random_tokens((3,) * num_rows), seed=1)
        for _ in range(3):
            together.step(dict.fromkeys(together.done, 1))
        assert_same(together, alone)


@pytest.mark.parametrize(
    ("shape", "dtype", "how"),
    [("gqa", "float32", {}), ("gqa", "bfloat16", {}), ("gqa", "bfloat16", INT8_KV), ("latents", "bfloat16", {})],
)
def test_a_prefix_that_another_request_has_computed(saved: Saved, shape: str, dtype: str, how: dict[str, Any]) -> None:
    """Its blocks are taken over; what follows is as if the sequence had computed them by itself."""
    first, second = random_tokens((150, 170))
    second[:144] = first[:144]
    alone = Components(saved(shape), dtype, [second], seed=0, **how).run_alone()
    shared = Components(saved(shape), dtype, [first, second], seed=1, **how)
    while shared.left("0"):
        shared.step({"0": min(11, shared.left("0"))})
    shared.tables["1"][:9] = shared.tables["0"][:9]
    shared.done["1"] = 144
    while shared.left("1"):
        shared.step({"1": min(5, shared.left("1"))})
    assert torch.equal(torch.stack(shared.logits["1"]), torch.stack(alone.logits["0"][144:]))
    for mine, theirs in zip(shared.kv("1"), alone.kv("0"), strict=True):
        assert torch.equal(mine, theirs)


ROUNDED = ("gqa", "tied", "odd", "biases", "qwen3", "phi3", "opt")
"""Rows of 64, 112 and 48 inputs; those of ``odd`` (66 and 90) stay as they are, but for the 48 of its ``out``."""


@pytest.mark.parametrize(
    ("shape", "dtype", "how"),
    [
        *each_in(("gqa", "odd", "heads_of_20", "biases", "qwen3", "phi3", "opt"), {}),
        *each_in(("long_window", "experts", "shared_experts"), {}),
        *[(shape, *each) for shape in ROUNDED for each in (("float32", INT8), ("bfloat16", INT4))],
        *[by_night(shape, *each) for shape in ROUNDED for each in (("bfloat16", INT8), ("float32", INT4))],
        *[(shape, "bfloat16", INT8_KV) for shape in ("gqa", "odd", "heads_of_20", "long_window")],
        *[by_night(shape, "bfloat16", INT8_KV) for shape in ("mha", "mqa", "qwen3", "opt")],
        *[
            by_night(shape, "float32", INT8_KV)
            for shape in ("gqa", "mha", "mqa", "odd", "heads_of_20", "qwen3", "opt", "long_window")
        ],
    ],
)
def test_the_roundings_are_those_of_the_contract(saved: Saved, shape: str, dtype: str, how: dict[str, Any]) -> None:
    """Not only always the same: the bits are those that the ADRs promise."""
    (tokens,) = random_tokens((70 if "bits" in how else 150,))
    config = load_model_config(saved(shape))
    weights = load_weights(saved(shape), config, getattr(torch, dtype))
    if "bits" in how:
        weights = quantize_weights(weights, how["bits"])
    exact = ExactStep(config, weights, len(tokens), int8_kv=how == INT8_KV)
    ours = Components(saved(shape), dtype, [tokens], seed=0, **how).run(1, 41)
    assert np.array_equal(torch.stack(ours.logits["0"]).numpy(), exact.logits(tokens))


@pytest.fixture(params=["x86-64-v3", "x86-64"])
def other_registers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled step, and its contract, for processors whose registers hold 8 and 4 lanes."""
    avx2 = request.param == "x86-64-v3"
    flags = [flag for flag in library.COMPILE_FLAGS if not flag.startswith("-march")]
    monkeypatch.setattr(library, "COMPILE_FLAGS", [*flags, f"-march={request.param}"])
    monkeypatch.setattr(exact_step, "WIDTH", 8 if avx2 else 4)
    monkeypatch.setattr(exact_step.fma, "__kwdefaults__", {"fused": avx2})
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


@pytest.mark.nightly
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its registers have one width")
@pytest.mark.usefixtures("other_registers")
def test_heads_that_fill_no_vector_on_other_registers(tmp_path: Path) -> None:
    (tokens,) = random_tokens((140,))
    for head_dim in (18, 20, 24, 40):
        model_dir = save_model(tmp_path / str(head_dim), head_dim=head_dim, num_key_value_heads=2)
        config = load_model_config(model_dir)
        cases: list[tuple[str, dict[str, Any]]] = [("float32", {}), ("bfloat16", {}), ("float32", INT8_KV)]
        for dtype, how in cases:
            weights = load_weights(model_dir, config, getattr(torch, dtype))
            exact = ExactStep(config, weights, len(tokens), int8_kv=how == INT8_KV)
            ours = Components(model_dir, dtype, [tokens], seed=0, **how).run(1, 41)
            assert np.array_equal(torch.stack(ours.logits["0"]).numpy(), exact.logits(tokens)), (head_dim, dtype, how)


@pytest.mark.parametrize("shape", ROUNDED)
def test_which_matrices_are_rounded(saved: Saved, shape: str) -> None:
    weights = quantize_weights(load_weights(saved(shape), load_model_config(saved(shape)), torch.float32), 4)
    layer = weights.layers[0]
    kept = [type(each) for each in (layer.qkv, layer.out, layer.up, layer.down)]
    assert kept == ([Linear, QuantizedLinear, Linear, Linear] if shape == "odd" else [QuantizedLinear] * 4)
    assert isinstance(weights.lm_head, torch.Tensor) == (shape == "odd")
    if isinstance(weights.lm_head, QuantizedLinear):
        assert weights.lm_head.bits == 8


NUM_TOKENS = 12


@pytest.fixture(scope="module", params=[250, pytest.param(1000, marks=pytest.mark.nightly)])
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 300) for _ in range(rng.randint(1, 40))] for _ in range(request.param)]


def sampling(index: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(num_tokens, temperature=1.0, seed=index, ignore_eos=True)


def make_engine(model_dir: Path, dtype: str, **options) -> Engine:
    options = {"kv_memory": "1MiB", "max_batch_tokens": 256, **options}
    config = EngineConfig(block_size=16, num_threads=1, backend="native", **options)
    return Engine(model_dir, dtype=dtype, engine=config)


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(tiny_model_dir: Path, dtype: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The outputs of requests that came one after the other."""
    engine = make_engine(tiny_model_dir, dtype)
    return [engine.generate([prompt], sampling(index))[0].token_ids for index, prompt in enumerate(prompts)]


def test_batches_draw_what_a_request_draws_alone(
    tiny_model_dir: Path, dtype: str, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    """In a pool so small that requests are preempted and computed again, prompts in chunks of any size."""
    small = "96KiB" if dtype == "float32" else "48KiB"
    engine = make_engine(tiny_model_dir, dtype, max_batch_tokens=48, max_num_seqs=40, kv_memory=small)
    together = engine.generate(prompts, [sampling(index) for index in range(len(prompts))])
    assert engine.scheduler.num_preemptions > 0
    assert [completion.token_ids for completion in together] == alone


def test_a_resumed_request_goes_on_with_what_it_would_have_drawn(
    tiny_model_dir: Path, dtype: str, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    """As after the death of a worker: prompt and known output are computed as one prompt elsewhere, then it goes on."""
    known = [1 + index % (NUM_TOKENS - 1) for index in range(len(prompts))]
    engine = make_engine(tiny_model_dir, dtype)
    resumed = engine.generate(
        [[*prompt, *output[:count]] for prompt, output, count in zip(prompts, alone, known, strict=True)],
        [sampling(index, NUM_TOKENS - count) for index, count in enumerate(known)],
    )
    assert [
        (*output[:count], *rest.token_ids) for output, count, rest in zip(alone, known, resumed, strict=True)
    ] == alone
