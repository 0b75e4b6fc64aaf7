"""Blocks that not every family has, in bfloat16, with weights of 8 bits and with keys and values of 8 bits."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.small_models import save_model

LARGEST_ERROR = 0.12
"""Mean error of a logit over the mean size of one. A block that is left out changes logits by as much as they are."""

PROMPTS = [[((7 + 2 * seed) * i + seed) % 290 + 5 for i in range(41)] for seed in range(3)]
"""The median of their errors counts. Where two experts are nearly tied for a token, rounding picks the other one on
some processors, and the logits of that prompt are as far away as if a block were left out."""
PLAIN = ["bloom", "gemma2", "gemma3", "glm4", "gptj whole heads", "granite", "olmo2", "phi"]
WITH_EXPERTS = ["gpt-oss", "granite moe", "mixtral", "qwen2 moe", "qwen3 moe"]
TYPES: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch", "dtype": torch.bfloat16},
    "compiled": {"backend": "native", "dtype": torch.bfloat16},
    "int8": {"backend": "native", "dtype": torch.float32, "bits": 8},
    "kv int8": {"backend": "native", "dtype": torch.float32, "kv_dtype": "int8"},
}


def logits(model_dir: Path, **how: Any) -> list[Tensor]:
    """Behind each of the prompts, each computed in two chunks."""
    driver = Driver(ModelRunner.from_dir(model_dir, num_blocks=8 * len(PROMPTS), block_size=16, **how))
    return [_behind(driver, str(number), prompt) for number, prompt in enumerate(PROMPTS)]


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


@pytest.mark.parametrize("name", [*PLAIN, *WITH_EXPERTS])
def test_other_types_compute_nearly_the_same(name: str, tmp_path: Path) -> None:
    model_dir = save_model(tmp_path, **FAMILIES[name])
    exact = logits(model_dir, backend="torch", dtype=torch.float32)
    for kind, how in TYPES.items():
        error = median_error(logits(model_dir, **how), exact)
        assert error < LARGEST_ERROR, f"{kind}: {error:.3f}"


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_in_4_bits_are_multiplied_as_they_are_rounded(name: str, tmp_path: Path) -> None:
    """The weights of both are the same; the compiled step rounds its inputs to 8 bits besides."""
    model_dir = save_model(tmp_path, **FAMILIES[name])
    exact = logits(model_dir, backend="torch", dtype=torch.float32, bits=4)
    error = median_error(logits(model_dir, backend="native", dtype=torch.float32, bits=4), exact)
    assert error < LARGEST_ERROR, f"{error:.3f}"
