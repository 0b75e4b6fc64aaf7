"""Published checkpoints that tests compute with: in ``FARSIGHT_MODELS`` or the cache; downloaded once a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from farsight.core.errors import FarsightError
from farsight.engine.checkpoint.catalogue import catalogue, models_dir
from farsight.engine.checkpoint.gguf_model import gguf_config
from farsight.engine.checkpoint.model_config import config_of
from farsight.services.commands.model_sources import fetch
from farsight.tokenization.gguf_file import read_gguf
from farsight.tokenization.loading import load_tokenizer
from tests.unit.engine.gguf_files import gguf_name


def published(name: str) -> Path:
    """Returns the file of a model of the catalogue; skips the test where it cannot be had."""
    try:
        return fetch(catalogue()[name], models_dir(), print)
    except FarsightError as error:
        pytest.skip(str(error))


def smollm2() -> Path:
    """Returns SmolLM2-135M-Instruct in 4 bits (Q4_1, 94 MiB, Apache-2.0)."""
    return published("smollm2")


def gemma3() -> Path:
    """Returns Gemma 3 270M in 4 to 8 bits (Q4_K_M, 241 MiB, Gemma's terms), which does not chat: for the night."""
    return published("gemma3-270m")


def smollm2_floats(factory: pytest.TempPathFactory) -> Path:
    """Returns the weights of ``smollm2`` in float32 as a directory of transformers: ``smol-hf`` beside it, or new."""
    folder = models_dir() / "smol-hf"
    if not (folder / "model.safetensors").is_file():
        folder = factory.mktemp("smol-hf")
        _write_floats(smollm2(), folder)
    return folder


def _write_floats(path: Path, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from farsight.engine.checkpoint.sources import open_checkpoint

    header = read_gguf(path)
    model = LlamaForCausalLM(LlamaConfig(**gguf_config(header)))
    source = open_checkpoint(path, config_of(header))
    with torch.no_grad():
        for name, values in model.named_parameters():
            source.fill(gguf_name(name, "llama"), values)
    model.save_pretrained(folder)
    load_tokenizer(path).save(str(folder / "tokenizer.json"))
