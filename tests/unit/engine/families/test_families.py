"""Every family computes the tokens of its reference, by torch operations and by the compiled step.

One scenario a family: prompts that share a prefix, prefills in chunks beside decodes, in a pool so small that sequences
are preempted and computed again. Then what moves about, other types of numbers, and factors that a request chooses.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.core.request import SamplingParams, SequenceStatus
from farsight.engine.checkpoint.families import ARCHITECTURES
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.engine import Engine
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver, outputs_of
from tests.unit.engine.families.shapes import FAMILIES, HYBRIDS
from tests.unit.engine.families.written import WRITTEN, save_written, written_logits
from tests.unit.engine.small_models import assert_best, load_reference, save_model
from tests.unit.engine.test_engine import families, greedy, with_random_moves

Reference = Callable[[list[int]], Tensor]
"""Logits of every position of a sequence."""

NUM_TOKENS = 20
BLOCK_SIZE = 16
POOL_BLOCKS = 7


def prompts() -> list[list[int]]:
    """Seven prompts; the last three begin with the first one."""
    rng = random.Random(5)
    own = [[rng.randrange(3, 300) for _ in range(length)] for length in (37, 3, 18, 25)]
    return [*own, *([*own[0], *own[i], 7] for i in (1, 2, 3))]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    """The directory of a family's model, and its reference."""

    @functools.cache
    def make(name: str) -> tuple[Path, Reference]:
        out = tmp_path_factory.mktemp("family")
        if name in WRITTEN:
            tensors = save_written(out, name)
            return out, lambda ids: written_logits(name, tensors, ids)
        save_model(out, **FAMILIES[name])
        model: Any = load_reference(out)
        return out, lambda ids: model(torch.tensor([ids])).logits[0]

    return make


BY_DAY_ON_TORCH = ("qwen3", "gpt2", "bloom", "gemma2", "qwen3 moe", "deepseek v3", "gemma4 e", "lfm2", "qwen3.5")
"""Every kind of block: grouped queries with norms of heads, learned positions, ALiBi, capped and sliding attention,
experts, latent attention, layers of several shapes and states. The compiled step runs all families by day, torch the
other ones by night."""


def cases() -> list[Any]:
    """Each family on each backend."""
    found = []
    for name in [*FAMILIES, *WRITTEN]:
        marks = [] if name in BY_DAY_ON_TORCH else [pytest.mark.nightly]
        found += [pytest.param(name, "torch", marks=marks), pytest.param(name, "native")]
    return found


@pytest.mark.parametrize(("name", "backend"), cases())
def test_tokens_are_those_of_the_reference(
    name: str, backend: str, family: Callable[[str], tuple[Path, Reference]]
) -> None:
    model_dir, reference = family(name)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_threads=1,
        backend=backend,
        max_batch_tokens=24,
        max_num_seqs=5,
        kv_memory=str(POOL_BLOCKS * BLOCK_SIZE * load_model_config(model_dir).kv_bytes_per_token(torch.float32)),
        max_model_len=100,
        speculation="off",  # so that both backends run the same steps
    )
    engine = Engine(model_dir, dtype="float32", engine=config)
    given = prompts()
    outputs = engine.generate(given, SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True))
    assert engine.scheduler.num_preemptions > 0
    assert engine.worker.executor.prefix_hits > 0
    for prompt, output in zip(given, outputs, strict=True):
        assert len(output.token_ids) == NUM_TOKENS
        with torch.no_grad():
            logits = reference([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        assert_best(logits.float(), output.token_ids)


def test_every_family_is_compared() -> None:
    """What the registry says of a family is what these tests compare."""
    read = {name: fields["architecture"] for name, fields in FAMILIES.items()}
    written = {name: fields["architectures"][0] for name, fields in WRITTEN.items()}
    assert {*read.values(), *written.values()} == set(ARCHITECTURES)
    verified = {name for name, architecture in ARCHITECTURES.items() if architecture.evidence.verified}
    assert verified == set(read.values())


ROOMY = EngineConfig(kv_memory="4MiB", block_size=BLOCK_SIZE, max_num_seqs=8, max_batch_tokens=32, num_threads=1)
DEVICE_BLOCKS, HOST_BLOCKS = 9, 12


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in HYBRIDS])
def test_moved_sequences_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    model_dir = save_model(tmp_path, **FAMILIES[name])
    prompts = families(12, seed=10)
    sampling = [greedy(20, temperature=0.8, seed=i) for i in range(12)]
    expected = Engine(model_dir, engine=ROOMY).generate(prompts, sampling)
    block_bytes = load_model_config(model_dir).kv_bytes_per_token(torch.float32) * BLOCK_SIZE
    tight = dataclasses.replace(
        ROOMY, kv_memory=str(DEVICE_BLOCKS * block_bytes), host_kv_memory=str(HOST_BLOCKS * block_bytes)
    )
    engine, policy = with_random_moves(model_dir, tight, random.Random(11))
    found, seen = outputs_of(engine, [engine.submit(*each) for each in zip(prompts, sampling, strict=True)])
    assert found == [completion.token_ids for completion in expected]
    assert SequenceStatus.OFFLOADED in seen and policy.num_events > 0


LARGEST_ERROR = 0.12
"""Mean error of a logit over the mean size of one. A block that is left out changes logits by as much as they are."""

TYPED_PROMPTS = [[((7 + 2 * seed) * i + seed) % 290 + 5 for i in range(41)] for seed in range(3)]
"""The median of their errors counts. Where two experts are nearly tied for a token, rounding picks the other one on
some processors, and the logits of that prompt are as far away as if a block were left out."""
PLAIN = ["bloom", "gemma2", "gemma3", "glm4", "gptj whole heads", "granite", "olmo2", "phi"]
WITH_EXPERTS = ["gpt-oss", "granite moe", "mixtral", "qwen2 moe", "qwen3 moe"]
WITH_LATENTS = ["deepseek v3"]
TYPES: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch", "dtype": torch.bfloat16},
    "compiled": {"backend": "native", "dtype": torch.bfloat16},
    "int8": {"backend": "native", "dtype": torch.float32, "bits": 8},
    "kv int8": {"backend": "native", "dtype": torch.float32, "kv_dtype": "int8"},
}


def logits(model_dir: Path, **how: Any) -> list[Tensor]:
    """Behind each of the prompts, each computed in two chunks."""
    driver = Driver(ModelRunner.from_dir(model_dir, num_blocks=8 * len(TYPED_PROMPTS), block_size=16, **how))
    return [_behind(driver, str(number), prompt) for number, prompt in enumerate(TYPED_PROMPTS)]


def _behind(driver: Driver, name: str, prompt: list[int]) -> Tensor:
    driver.add(name, prompt)
    driver.logits(**{name: 29})
    found = driver.logits(**{name: 12})[0]
    assert found is not None
    return found.clone()


def median_error(found: list[Tensor], exact: list[Tensor]) -> float:
    return statistics.median(
        float((one - other).abs().mean() / other.abs().mean()) for one, other in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize("name", [*PLAIN, *WITH_EXPERTS, *WITH_LATENTS])
def test_other_types_compute_nearly_the_same(name: str, tmp_path: Path) -> None:
    model_dir = save_model(tmp_path, **FAMILIES[name])
    exact = logits(model_dir, backend="torch", dtype=torch.float32)
    for kind, how in TYPES.items():
        if name in WITH_LATENTS and "kv_dtype" in how:
            with pytest.raises(ConfigError, match="kv_dtype"):
                logits(model_dir, **how)
            continue
        error = median_error(logits(model_dir, **how), exact)
        assert error < LARGEST_ERROR, f"{kind}: {error:.3f}"


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_in_4_bits_are_multiplied_as_they_are_rounded(name: str, tmp_path: Path) -> None:
    """The weights of both are the same; the compiled step rounds its inputs to 8 bits besides."""
    model_dir = save_model(tmp_path, **FAMILIES[name])
    exact = logits(model_dir, backend="torch", dtype=torch.float32, bits=4)
    error = median_error(logits(model_dir, backend="native", dtype=torch.float32, bits=4), exact)
    assert error < LARGEST_ERROR, f"{error:.3f}"


WINDOW = 64
ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + 4 * i for i in range(8)]}
PHI3: dict[str, Any] = {
    "architecture": "Phi3ForCausalLM",
    "max_position_embeddings": 256,
    "original_max_position_embeddings": WINDOW,
    "rope_scaling": ROPE,
}
SMALL = EngineConfig(kv_memory="8MiB", block_size=16, max_num_seqs=8, max_batch_tokens=48, num_threads=1)
OUTPUT = 8
BEGIN = [3, 7, 11, 200, 41, 9, 150, 4] * 4
LONG_PROMPTS = [BEGIN[:5], BEGIN[: WINDOW // 2], BEGIN + [17] * (WINDOW // 2 + 3), BEGIN * 3]


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("phi3"), **PHI3)


def answer(engine: Engine, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Returns the tokens of a greedy answer and their log probabilities."""
    engine.submit(prompt, SamplingParams(OUTPUT, logprobs=0, ignore_eos=True))
    ids: list[int] = []
    values: list[float] = []
    while not engine.idle:
        for delta in engine.step():
            assert delta.logprobs is not None
            ids += delta.token_ids
            values += [found[0] for _, found in delta.logprobs.output]
    return ids, values


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_each_request_has_the_factors_of_its_length(phi3: Path, backend: str) -> None:
    """One after the other in one engine, whose cache holds their common beginning under both kinds of factors."""
    reference = load_reference(phi3)
    by_request, served = (
        Engine(phi3, dtype="float32", engine=dataclasses.replace(SMALL, backend=backend, long_factors=kind))
        for kind in ("request", "served")
    )
    for prompt in LONG_PROMPTS:
        for engine, taken in ((by_request, True), (served, len(prompt) > WINDOW)):
            ids, values = answer(engine, prompt)
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
            theirs = logits.log_softmax(-1)[range(OUTPUT), ids]
            off = (torch.tensor(values) - theirs).abs().max().item()
            assert (off < 1e-3) is taken, (len(prompt), off)


def test_where_it_cannot_be_chosen(phi3: Path) -> None:
    with pytest.raises(InvalidValueError, match="long_factors"):
        EngineConfig(long_factors="sequence")
    with pytest.raises((InvalidValueError, ConfigError), match="long_factors"):
        EngineConfig(long_factors="request", device="cuda")
