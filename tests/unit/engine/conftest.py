"""Checkpoints shared by the engine's tests."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from farsight.core.config.engine import EngineConfig
from farsight.engine.build import build_worker
from farsight.engine.steps.model_runner import ModelRunner
from farsight.engine.worker import Worker
from tests.unit.engine.native.components import MODELS
from tests.unit.engine.small_models import SHAPES, save_model

POISON = 300
"""The token of the broken model whose embedding is NaN."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of the tiny model of a shape named in ``SHAPES``."""

    @functools.cache
    def make(shape: str) -> Path:
        return save_model(tmp_path_factory.mktemp(f"model-{shape}"), **SHAPES[shape])

    return make


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a model named in ``MODELS`` of the compiled step's tests."""

    @functools.cache
    def make(shape: str) -> Path:
        return save_model(tmp_path_factory.mktemp("model"), **({"num_hidden_layers": 2} | MODELS[shape]))

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(model_dir: Callable[[str], Path]) -> Path:
    """A float32 model with grouped-query attention and a byte-level tokenizer."""
    return model_dir("gqa")


BLOCK_SIZES = {"torch": 4, "native": 16}


@pytest.fixture(params=list(BLOCK_SIZES))
def make_runner(model_dir: Callable[[str], Path], request: pytest.FixtureRequest) -> Callable[..., ModelRunner]:
    """A runner over a pool full of NaN, which must never be seen; of each backend in turn."""
    backend = request.param

    def make(
        shape: str = "gqa",
        dtype: str = "float32",
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZES[backend],
    ) -> ModelRunner:
        runner = ModelRunner.from_dir(
            model_dir(shape),
            dtype=getattr(torch, dtype),
            num_blocks=num_blocks,
            block_size=block_size,
            backend=backend,
        )
        for cache in (*runner.pool.keys, *runner.pool.values):
            cache.fill_(float("nan"))
        return runner

    return make


@pytest.fixture(scope="module")
def broken_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The tiny model, with NaN for the embedding of the token ``POISON``."""
    out = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny_model_dir, out)
    weights = load_file(out / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture
def worker(tiny_model_dir: Path) -> Worker:
    config = EngineConfig(kv_memory="1MiB", block_size=4, num_threads=1)
    return build_worker(tiny_model_dir, "float32", config, incarnation="w")
