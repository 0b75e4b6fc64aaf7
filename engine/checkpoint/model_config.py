"""A checkpoint's ``config.json``, reduced to what the engine computes with.

Both spellings are read: transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and transformers 5
(``rope_parameters``, ``dtype``). Missing fields take the defaults of the architecture's configuration in transformers.
A field that would change the computation in a way the engine does not know is an error, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from core.errors import ConfigError, InvalidValueError
from engine.checkpoint.architectures import ARCHITECTURES, Architecture, Windows
from engine.checkpoint.config_fields import Fields, UnsupportedModelError, read_json
from engine.checkpoint.gguf_model import gguf_config, rope_factors
from engine.checkpoint.quantization import Quantization, read_quantization
from engine.checkpoint.rotary_config import FactorScaling, read_rotary
from engine.checkpoint.rotary_config import RotaryConfig as RotaryConfig
from tokenization.gguf.file import GGUFFile, is_gguf, read_gguf
from tokenization.model_dir import model_file

if TYPE_CHECKING:  # reading a configuration must not cost a process the whole of torch
    import torch

MODEL_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
"""Files fetched from the hub: configuration, weights, tokenizer and chat template."""

POSITION_OFFSET = 2
"""The rows that OPT's table of positions begins with and that no position uses."""

MAX_LAYERS = 4096
"""Most layers of a model; the deepest ones have some hundred."""

KV_SCALE_BYTES = 4
"""Bytes of the scale of a token and head in a KV pool of 8 bits."""

_LAYER_NORM_EPS = 1e-5  # torch's own default: OPT has no field for it
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder; names as in transformers.

    Attributes:
        max_position_embeddings: Context length, in tokens.
        norm: Root mean square with a weight, or LayerNorm with weight and bias; before attention, MLP and lm_head.
        activation: ``silu`` is gated, ``down(silu(gate) * up)``; the others plain, ``down(act(up))``.
        rotary: None if positions are learned embeddings.
        sliding_windows: By layer. With a window ``w`` position ``q`` attends to ``q - w < k <= q``.
        qk_norm: Whether each head of queries and keys goes through an RMS norm before the rotary embedding.
        checkpoint_dtype: The dtype of the stored weights.
        eos_token_ids: Tokens that end an output; may be empty.
        architecture: A key of ``ARCHITECTURES``.
        qkv_bias: Whether queries, keys and values have biases.
        out_bias: The same for attention's output.
        mlp_bias: The same for both layers of the MLP.
        final_norm: Whether there is a norm before lm_head.
        quantization: How the matrices of a safetensors checkpoint are stored; None in a float type, and for GGUF
            files, which say it of each tensor.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "relu", "gelu"]
    rotary: RotaryConfig | None
    sliding_windows: Windows
    qk_norm: bool
    tie_word_embeddings: bool
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    architecture: str
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    final_norm: bool = True
    quantization: Quantization | None = None

    @property
    def up_size(self) -> int:
        """Outputs of the MLP's first layer: gate and up where it is gated."""
        return self.intermediate_size * (2 if self.activation == "silu" else 1)

    @property
    def qkv_size(self) -> int:
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        hidden, query = self.hidden_size, self.num_attention_heads * self.head_dim
        norm = hidden * (2 if self.norm == "layer" else 1)
        layer = hidden * (self.qkv_size + query + self.up_size + self.intermediate_size) + 2 * norm
        layer += self.qkv_size * self.qkv_bias + hidden * self.out_bias + (self.up_size + hidden) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        if self.rotary is None:
            embeddings += (self.max_position_embeddings + POSITION_OFFSET) * hidden
        return self.num_hidden_layers * layer + embeddings + norm * self.final_norm

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes over all layers, in a pool of that type."""
        head_bytes = self.head_dim * dtype.itemsize + (KV_SCALE_BYTES if dtype.itemsize == 1 else 0)
        return 2 * self.num_hidden_layers * self.num_key_value_heads * head_bytes


def load_model_config(model_dir: Path) -> DecoderConfig:
    """The configuration in ``model_dir``, or in a GGUF file.

    Raises:
        UnsupportedModelError: another architecture, or a feature that the engine does not compute.
        InvalidValueError: no readable ``config.json``.
    """
    if is_gguf(model_dir):
        return config_of(read_gguf(model_dir))
    raw = read_json(model_dir, "config.json")
    if raw is None:
        raise InvalidValueError("model", str(model_dir), "a model directory with a config.json, or a GGUF file")
    name = _architecture(raw)
    generation = read_json(model_dir, "generation_config.json") or {}
    return _read(Fields(raw, ARCHITECTURES[name].defaults), name, generation)


def config_of(file: GGUFFile) -> DecoderConfig:
    """The configuration in a GGUF file.

    Raises:
        As ``load_model_config``.
    """
    raw = gguf_config(file)
    name = _architecture(raw)
    config = _read(Fields(raw, ARCHITECTURES[name].defaults), name, {})
    factors = rope_factors(file)
    if factors is None or config.rotary is None:
        return config
    if len(factors) != config.rotary.rotary_dim // 2 or config.rotary.scaling is not None:
        expected = f"{config.rotary.rotary_dim // 2} numbers and no other scaling"
        raise UnsupportedModelError("rope_freqs.weight", f"{len(factors)} numbers", expected)
    return replace(config, rotary=replace(config.rotary, scaling=FactorScaling(factors)))


def resolve_max_model_len(config: DecoderConfig, asked: int) -> int:
    """Tokens that a sequence may reach by what was asked for; 0 asks for the model's own context.

    Raises:
        ConfigError: more than the model's context, or more than its rotary embedding is right for.
    """
    limit = config.max_position_embeddings
    if asked > limit:
        raise ConfigError("engine.max_model_len", asked, f"at most {limit}, the model's own context")
    wanted = asked or limit
    exact = config.rotary.max_len if config.rotary else None
    if exact is not None and wanted > exact:
        expected = f"at most {exact} (the frequencies of longrope beyond are not computed): --max-model-len {exact}"
        raise ConfigError("engine.max_model_len", wanted, expected)
    return wanted


def resolve_model_dir(name_or_path: str, *, weights: bool = True) -> Path:
    """Where a model lies: an existing directory or GGUF file as it is, else a hub id, downloaded or in the hub's cache.

    Args:
        weights: Whether the weights are needed; the other files of a hub id are small.

    Raises:
        InvalidValueError: Neither a directory, nor a GGUF file, nor a model that the hub provides.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _alone_in(path) or path
    if is_gguf(path):
        if not path.is_file():
            raise InvalidValueError("model", name_or_path, "a GGUF file that exists, and is a regular file")
        return path
    patterns = [pattern for pattern in MODEL_FILES if weights or "safetensors" not in pattern]
    import huggingface_hub  # only here: most starts are from a directory, and the import costs time

    try:
        return Path(huggingface_hub.snapshot_download(name_or_path, allow_patterns=patterns))
    except (OSError, ValueError, RuntimeError) as error:  # no network, unknown or gated, malformed id
        reason = str(error).strip().split("\n")[0]
        expected = f"a model directory, a GGUF file or a Hugging Face hub id ({reason})"
        raise InvalidValueError("model", name_or_path, expected) from error


def _alone_in(folder: Path) -> Path | None:
    """The GGUF file of a directory that holds a single one and no ``config.json``."""
    if model_file(folder, "config.json") is not None:
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise InvalidValueError("model", str(folder), f"the path of one GGUF file, such as {found[0]}")
    return model_file(folder, found[0].name) if found else None


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(ARCHITECTURES):
        raise UnsupportedModelError("architectures", names, f"one of {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _read(config: Fields, name: str, generation: dict[str, Any]) -> DecoderConfig:
    architecture = ARCHITECTURES[name]
    _check_fixed(config, architecture)
    num_layers, num_heads = config.size("num_hidden_layers", MAX_LAYERS), config.size("num_attention_heads")
    head_dim = _head_dim(config, num_heads)
    biases = architecture.biases(config)
    return DecoderConfig(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size(architecture.spelled.get("intermediate_size", "intermediate_size")),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=_num_kv_heads(config, num_heads),
        head_dim=head_dim,
        max_position_embeddings=config.size("max_position_embeddings"),
        norm=architecture.norm,
        norm_eps=_LAYER_NORM_EPS if architecture.norm == "layer" else config.positive("rms_norm_eps"),
        activation=config.require(architecture.spelled.get("hidden_act", "hidden_act"), architecture.activations),
        rotary=_rotary(config, architecture, head_dim),
        sliding_windows=architecture.windows(config, num_layers),
        qk_norm=architecture.qk_norm,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        checkpoint_dtype=_checkpoint_dtype(config),
        eos_token_ids=_eos_token_ids(config, generation),
        architecture=name,
        qkv_bias=biases.qkv,
        out_bias=biases.out,
        mlp_bias=biases.mlp,
        quantization=read_quantization(config["quantization_config"]),
        final_norm=not (architecture.norm == "layer" and config.flag("_remove_final_layer_norm")),
    )


def _check_fixed(config: Fields, architecture: Architecture) -> None:
    """Refuses fields that would change the computation."""
    for name, value in architecture.fixed.items():
        if config[name] is not None and config[name] != value:
            raise config.error(name, json.dumps(value))
    projected = config["word_embed_proj_dim"]
    if projected is not None and projected != config.size("hidden_size"):
        raise config.error(
            "word_embed_proj_dim", f"hidden_size ({config['hidden_size']}): embeddings as wide as layers"
        )


def _head_dim(config: Fields, num_heads: int) -> int:
    head_dim, hidden_size = config.size_or_none("head_dim"), config.size("hidden_size")
    if head_dim is None and hidden_size % num_heads:
        raise config.error("hidden_size", f"a multiple of the {num_heads} attention heads")
    return head_dim or hidden_size // num_heads


def _num_kv_heads(config: Fields, num_heads: int) -> int:
    num_kv_heads = config.size_or_none("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of the {num_heads} attention heads")
    return num_kv_heads


def _rotary(config: Fields, architecture: Architecture, head_dim: int) -> RotaryConfig | None:
    if not architecture.rope_kinds:
        return None
    return read_rotary(config, head_dim, architecture.rope_kinds, partial=architecture.partial_rotary)


def _checkpoint_dtype(config: Fields) -> str:
    name = config["dtype"] or config["torch_dtype"] or "float32"
    dtype = str(name).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModelError("dtype", name, f"one of {', '.join(_DTYPES)}")
    return dtype


def _eos_token_ids(config: Fields, generation: dict[str, Any]) -> tuple[int, ...]:
    """``generation_config.json`` wins: chat models list there what ends a turn."""
    value = generation.get("eos_token_id")
    if value is None:
        value = config["eos_token_id"]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise UnsupportedModelError("eos_token_id", value, "an integer or a list of integers")
    return tuple(ids)
