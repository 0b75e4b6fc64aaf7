"""Every family computes the tokens of its reference, by torch operations and by the compiled step.

One scenario a family: prompts that share a prefix, prefills in chunks beside decodes, in a pool so small that sequences
are preempted and computed again.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.config.engine import EngineConfig
from core.request import SamplingParams
from engine.checkpoint.architectures import ARCHITECTURES
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.families.written import WRITTEN, save_written, written_logits
from tests.unit.engine.small_models import assert_best, load_reference, save_model

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


def compiled(name: str) -> list[str]:
    """The compiled backend, where it has all blocks of a family."""
    architecture = FAMILIES[name]["architecture"] if name in FAMILIES else WRITTEN[name]["architectures"][0]
    return ["native"] if ARCHITECTURES[architecture].compiled else []


BY_DAY_ON_TORCH = ("qwen3", "gpt2", "bloom", "gemma2", "qwen3 moe", "deepseek v3")
"""Every kind of block: grouped queries with norms of heads, learned positions, ALiBi, capped and sliding attention,
experts and latent attention. The compiled step runs all families by day, torch the other ones by night."""


def cases() -> list[Any]:
    """Each family on each backend that computes it; by day on one of the two at least."""
    found = []
    for name in [*FAMILIES, *WRITTEN]:
        is_nightly = bool(compiled(name)) and name not in BY_DAY_ON_TORCH
        found.append(pytest.param(name, "torch", marks=[pytest.mark.nightly] if is_nightly else []))
        found += [pytest.param(name, backend) for backend in compiled(name)]
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
