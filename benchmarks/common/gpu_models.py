"""Models of random weights, made on the device that runs them. For tests and measurements on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from farsight.engine.checkpoint.model_config import DecoderConfig, load_model_config
from farsight.engine.checkpoint.weights import ModelWeights, allocate_weights

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}

SHAPES: dict[str, dict[str, object]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 1024,
    },
    # Mistral 7B v0.3, which has no sliding window
    "7b": {
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
    },
}


def model_config(shape: str, directory: Path, dtype: str = "bfloat16", **changes: object) -> DecoderConfig:
    """The configuration of a shape; written to ``directory``, as checkpoints have it."""
    raw = {**_LLAMA, "torch_dtype": dtype, **SHAPES[shape], **changes}
    (directory / "config.json").write_text(json.dumps(raw), "utf-8")
    return load_model_config(directory)


def random_weights(config: DecoderConfig, dtype: torch.dtype, device: str, seed: int = 0) -> ModelWeights:
    """Weights that keep activations of the size they have and spread logits out, so that rounding decides little."""
    return _random_weights(config, dtype, device, seed)[0]


def save_random_checkpoint(config: DecoderConfig, directory: Path, dtype: torch.dtype, seed: int = 0) -> None:
    """A checkpoint of such weights beside its ``config.json``."""
    _, tensors = _random_weights(config, dtype, "cpu", seed)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def _random_weights(
    config: DecoderConfig, dtype: torch.dtype, device: str, seed: int
) -> tuple[ModelWeights, dict[str, torch.Tensor]]:
    weights, tensors = allocate_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.normal_(1.0, 0.1, generator=generator)
        elif "embed" in name or "lm_head" in name:
            tensor.normal_(0.0, 1.0 if "embed" in name else 2.0 * config.hidden_size**-0.5, generator=generator)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
    return weights, tensors
