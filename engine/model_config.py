"""What a checkpoint's ``config.json`` says, reduced to what the engine computes with.

Both spellings are read: transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and transformers 5
(``rope_parameters``, ``dtype``). Missing fields take the defaults of transformers' ``LlamaConfig``. A field that
would change the computation in a way the engine does not know is an error, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import InvalidValueError

if TYPE_CHECKING:  # reading a configuration must not cost a process the whole of torch
    import torch

SUPPORTED_ARCHITECTURE = "LlamaForCausalLM"
MODEL_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
"""What is fetched from the hub: configuration, weights, tokenizer and chat template."""

_DTYPES = ("float32", "bfloat16", "float16")


class UnsupportedModelError(InvalidValueError):
    """A checkpoint that the engine cannot run; says which field of its configuration is to blame."""


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama model; names as in transformers.

    Attributes:
        max_position_embeddings: Context length, in tokens.
        checkpoint_dtype: What the weights are stored in.
        eos_token_ids: Tokens that end an output; may be empty.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        attention = 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * dtype.itemsize


def load_model_config(model_dir: Path) -> LlamaConfig:
    """The configuration in ``model_dir``.

    Raises:
        UnsupportedModelError: another architecture, or a feature that the engine does not compute.
        InvalidValueError: no readable ``config.json``.
    """
    raw = _read_json(model_dir / "config.json")
    if raw is None:
        raise InvalidValueError("model", str(model_dir), "a model directory with a config.json")
    _check_supported(raw)
    hidden_size = _size(raw, "hidden_size", 4096)
    num_heads = _size(raw, "num_attention_heads", 32)
    config = LlamaConfig(
        vocab_size=_size(raw, "vocab_size", 32000),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size", 11008),
        num_hidden_layers=_size(raw, "num_hidden_layers", 32),
        num_attention_heads=num_heads,
        num_key_value_heads=_size(raw, "num_key_value_heads", num_heads),
        head_dim=_size(raw, "head_dim", hidden_size // num_heads),
        max_position_embeddings=_size(raw, "max_position_embeddings", 2048),
        rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        checkpoint_dtype=_checkpoint_dtype(raw),
        eos_token_ids=_eos_token_ids(raw, _read_json(model_dir / "generation_config.json") or {}),
    )
    kv_heads = config.num_key_value_heads
    if num_heads % kv_heads:
        raise UnsupportedModelError("num_key_value_heads", kv_heads, f"a divisor of the {num_heads} attention heads")
    if config.head_dim % 2:
        raise UnsupportedModelError("head_dim", config.head_dim, "an even number (rotary embedding turns pairs)")
    return config


def resolve_model_dir(name_or_path: str) -> Path:
    """The directory of a model: an existing one as it is, else a hub id, downloaded or found in the hub's cache.

    Raises:
        InvalidValueError: neither a directory nor a model that can be had from the hub.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    import huggingface_hub  # only here: most starts are from a directory, and the import costs time

    try:
        return Path(huggingface_hub.snapshot_download(name_or_path, allow_patterns=MODEL_FILES))
    except (OSError, ValueError, RuntimeError) as error:  # no network, unknown or gated, malformed id
        reason = str(error).strip().split("\n")[0]
        expected = f"a model directory or a Hugging Face hub id ({reason})"
        raise InvalidValueError("model", name_or_path, expected) from error


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValueError(str(path), str(error), "a JSON file") from error
    if not isinstance(raw, dict):
        raise InvalidValueError(str(path), raw, "a JSON object")
    return raw


def _check_supported(raw: dict[str, Any]) -> None:
    if raw.get("architectures") != [SUPPORTED_ARCHITECTURE]:
        raise UnsupportedModelError("architectures", raw.get("architectures"), f"[{SUPPORTED_ARCHITECTURE!r}]")
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field, False):
            raise UnsupportedModelError(field, raw[field], "false (linear layers have no bias)")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError("hidden_act", raw["hidden_act"], "'silu'")
    if raw.get("quantization_config") is not None:
        raise UnsupportedModelError("quantization_config", raw["quantization_config"], "none (weights in a float type)")


def _rope_theta(raw: dict[str, Any]) -> float:
    """Base of the rotary frequencies; only the plain ("default") rotary embedding is computed."""
    theta: dict[str, Any] = {"rope_theta": raw.get("rope_theta", 10000.0)}
    for field in ("rope_scaling", "rope_parameters"):
        parameters = raw.get(field) or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise UnsupportedModelError(f"{field}.rope_type", kind, "'default'")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(f"{field}.partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
        theta.update({key: value for key, value in parameters.items() if key == "rope_theta"})
    return _positive(theta, "rope_theta", 10000.0)


def _checkpoint_dtype(raw: dict[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = str(name).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModelError("dtype", name, f"one of {', '.join(_DTYPES)}")
    return dtype


def _eos_token_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """``generation_config.json`` wins: chat models list there what ends a turn."""
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id", 2)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise UnsupportedModelError("eos_token_id", value, "an integer or a list of integers")
    return tuple(ids)


def _size(raw: dict[str, Any], field: str, default: int) -> int:
    value = raw.get(field)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise UnsupportedModelError(field, value, "an integer >= 1")
    return value


def _positive(raw: dict[str, Any], field: str, default: float) -> float:
    value = raw.get(field)
    if value is None:
        return default
    if type(value) not in (int, float) or not value > 0:
        raise UnsupportedModelError(field, value, "a number > 0")
    return float(value)
