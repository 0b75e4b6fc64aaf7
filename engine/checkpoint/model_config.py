"""A checkpoint's ``config.json``, reduced to what the engine computes with.

Both spellings are read: transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and transformers 5
(``rope_parameters``, ``dtype``). Missing fields take the defaults of the architecture's configuration in transformers.
A field that would change the computation in a way the engine does not know is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from farsight.core.errors import ConfigError, InvalidValueError
from farsight.engine.checkpoint.catalogue import catalogue, pulled_file
from farsight.engine.checkpoint.config_fields import Fields, UnsupportedModelError, read_json
from farsight.engine.checkpoint.families import ARCHITECTURES
from farsight.engine.checkpoint.families.mixers import Mixer
from farsight.engine.checkpoint.families.record import (
    ACTIVATIONS,
    Architecture,
    Biases,
    Blocks,
    Experts,
    Latent,
    LayerShape,
    TensorNames,
    Windows,
    of_config,
)
from farsight.engine.checkpoint.families.vision import TEXTS, VISION, NestedText, seeing_name, text_part
from farsight.engine.checkpoint.gguf_model import gguf_config, gguf_family, rope_factors
from farsight.engine.checkpoint.quantization import Quantization, read_quantization
from farsight.engine.checkpoint.rotary_config import FactorScaling, LongScaling, read_rotary
from farsight.engine.checkpoint.rotary_config import RotaryConfig as RotaryConfig
from farsight.tokenization.gguf_file import GGUFFile, is_gguf, read_gguf
from farsight.tokenization.model_dir import model_file

if TYPE_CHECKING:  # reading a configuration must not cost a process the whole of torch
    import torch

MODEL_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
"""Files fetched from the hub: configuration, weights, tokenizer and chat template."""

MAX_LAYERS = 4096
"""Most layers of a model; the deepest ones have some hundred."""

KV_SCALE_BYTES = 4
"""Bytes of the scale of a token and head in a KV pool of 8 bits."""

_DTYPES = ("float32", "bfloat16", "float16")

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""A name, or an owner and a name: what has another form, such as ``/models/x`` or ``./x``, can only be a path."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder; names as in transformers.

    Attributes:
        max_position_embeddings: Context length, in tokens.
        norm: Root mean square with a weight, or LayerNorm.
        activation: The MLP's; ``gelu_tanh`` is GELU's approximation by tanh.
        rotary: None if nothing is turned.
        sliding_windows: By layer. With a window ``w`` position ``q`` attends to ``q - w < k <= q``.
        checkpoint_dtype: The dtype of the stored weights.
        eos_token_ids: Tokens that end an output; may be empty.
        architecture: A key of ``ARCHITECTURES``.
        biases: Which linear layers have one.
        blocks: How layers are put together.
        names: The checkpoint's names of its tensors.
        rotaries: The rotary embedding by layer, where layers differ; then ``rotary`` is one of them.
        experts: The mixture of experts that some of its layers have; None without.
        latent: Latent attention: ``head_dim`` is the width of the row that all heads read, the only KV head.
        shapes: The shape of each layer, where layers differ; ``head_dim`` and the others are then those of one of them.
        quantization: How the matrices of a safetensors checkpoint are stored; None in a float type, and for GGUF
            files, which say it of each tensor.
        sees: Its name in ``engine.checkpoint.families.vision.VISION``, where its prompts may hold images; empty
            for a model of text alone.
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
    activation: Literal["silu", "relu", "gelu", "gelu_tanh"]
    rotary: RotaryConfig | None
    sliding_windows: Windows
    tie_word_embeddings: bool
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    architecture: str
    biases: Biases
    blocks: Blocks
    names: TensorNames
    rotaries: tuple[RotaryConfig | None, ...] | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    shapes: tuple[LayerShape, ...] | None = None
    quantization: Quantization | None = None
    sees: str = ""

    @property
    def up_size(self) -> int:
        """Outputs of the MLP's first layer: gate and up where it is gated."""
        return self.intermediate_size * (2 if self.blocks.gated else 1)

    def shape(self, layer: int) -> LayerShape:
        """Returns the sizes of a layer."""
        if self.shapes is not None:
            return self.shapes[layer]
        return LayerShape(self.head_dim, self.num_key_value_heads, self.intermediate_size)

    @property
    def kv_layers(self) -> list[int]:
        """Numbers of the layers whose keys and values the pool holds."""
        return [layer for layer in range(self.num_hidden_layers) if self.shape(layer).keeps_kv]

    @property
    def mixers(self) -> list[tuple[int, Mixer]]:
        """Layers with a state in place of attention, and what they have."""
        found = ((layer, self.shape(layer).mixer) for layer in range(self.num_hidden_layers))
        return [(layer, mixer) for layer, mixer in found if mixer is not None]

    @property
    def state_size(self) -> int:
        """Values of a sequence's states in all layers, each of 4 bytes; 0 for a model of attention alone."""
        return sum(mixer.state_size for _, mixer in self.mixers)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states in all layers."""
        return 4 * self.state_size

    def mixture(self, layer: int) -> Experts | None:
        """The experts of a layer; None where it has a plain MLP."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None

    def with_factors_by_request(self) -> DecoderConfig:
        """Returns the configuration with ``LongScaling.by_request``, where there is such a scaling."""
        if self.rotary is None or not isinstance(self.rotary.scaling, LongScaling):
            return self
        scaling = dataclasses.replace(self.rotary.scaling, by_request=True)
        return dataclasses.replace(self, rotary=dataclasses.replace(self.rotary, scaling=scaling))

    @property
    def layer_rotaries(self) -> tuple[RotaryConfig | None, ...]:
        """The rotary embedding of each layer."""
        return (self.rotary,) * self.num_hidden_layers if self.rotaries is None else self.rotaries

    @property
    def kv_rows(self) -> int:
        """Rows that the KV pool holds of a token, layer and KV head: key and value, or the latent that is both."""
        return 2 if self.latent is None else 1

    @property
    def attended_size(self) -> int:
        """Inputs of the linear layer behind attention."""
        return self.num_attention_heads * (self.head_dim if self.latent is None else self.latent.value)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes over all layers, in a pool of that type."""
        scale = KV_SCALE_BYTES if dtype.itemsize == 1 else 0
        shapes = [self.shape(layer) for layer in self.kv_layers]
        return sum(self.kv_rows * each.kv_heads * (each.head_dim * dtype.itemsize + scale) for each in shapes)


def load_model_config(model_dir: Path) -> DecoderConfig:
    """Returns the configuration in ``model_dir``, or in a GGUF file.

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
    if name in VISION or name in TEXTS:
        part = text_part(raw, name)
        config = _read(_fields(part.raw, part.architecture), part.architecture, generation)
        if name in VISION:
            return _seeing(config, part, name)
        return replace(config, names=replace(config.names, renamed=TEXTS[name].renamed, elsewhere=TEXTS[name].towers))
    return _read(_fields(raw, name), name, generation)


def _seeing(config: DecoderConfig, part: NestedText, name: str) -> DecoderConfig:
    """Returns the text model of one that sees, with what its checkpoint and its positions have beside."""
    family, rotary = VISION[name], config.rotary
    if part.sections and rotary is not None:
        if 2 * sum(part.sections) != rotary.rotary_dim:
            raise UnsupportedModelError("mrope_section", list(part.sections), f"a sum of {rotary.rotary_dim // 2}")
        axes = tuple(axis % 3 for axis, size in enumerate(part.sections) for _ in range(size))
        rotary = replace(rotary, axes=axes)
    names = replace(config.names, renamed=family.renamed, elsewhere=family.towers)
    return replace(config, rotary=rotary, names=names, sees=name)


def config_of(file: GGUFFile) -> DecoderConfig:
    """Returns the configuration in a GGUF file.

    Raises:
        As ``load_model_config``.
    """
    raw, family = gguf_config(file), gguf_family(file)
    config = _read(_fields(raw, family.architecture), family.architecture, {})
    config = replace(config, names=family.names)
    if config.blocks.norm_offset is not None:  # the file has the sums
        config = replace(config, blocks=replace(config.blocks, norm_offset=0.0))
    factors = None if family.proportional else rope_factors(file)
    if factors is None or config.rotary is None:
        return config
    taken = config.rotary.scaling is not None or config.rotaries is not None
    if len(factors) != config.rotary.rotary_dim // 2 or taken:
        expected = f"{config.rotary.rotary_dim // 2} numbers and no other scaling"
        raise UnsupportedModelError("rope_freqs.weight", f"{len(factors)} numbers", expected)
    return replace(config, rotary=replace(config.rotary, scaling=FactorScaling(factors)))


def resolve_max_model_len(config: DecoderConfig, asked: int) -> int:
    """Returns the tokens that a sequence may reach by what was asked for; 0 asks for the model's own context.

    Raises:
        ConfigError: more than the model's context, and more than its rotary embedding is stretched to.
    """
    stretched = config.rotary.stretched_len if config.rotary else 0
    limit = max(config.max_position_embeddings, stretched)
    if asked > limit:
        raise ConfigError("engine.max_model_len", asked, f"at most {limit}, the model's own context")
    return asked or config.max_position_embeddings


def resolve_model_dir(name_or_path: str, *, weights: bool = True) -> Path:
    """Returns where a model lies.

    A name of the catalogue comes first, then a directory or GGUF file that exists, then a hub id, downloaded or in the
    hub's cache. A directory that is called like a model of the catalogue is ``./NAME``.

    Args:
        weights: Whether the weights are needed; the other files of a hub id are small.

    Raises:
        InvalidValueError: None of these, or a model of the catalogue that has not been pulled.
    """
    if name_or_path in catalogue():
        return pulled_file(catalogue()[name_or_path])
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _alone_in(path) or path
    if is_gguf(path):
        if not path.is_file():
            raise InvalidValueError("model", name_or_path, "a GGUF file that exists, and is a regular file")
        return path
    if not HUB_ID.fullmatch(name_or_path):
        expected = "a model directory or GGUF file that exists, a name that `farsight models` lists, or a hub id"
        raise InvalidValueError("model", name_or_path, expected)
    patterns = [pattern for pattern in MODEL_FILES if weights or "safetensors" not in pattern]
    import huggingface_hub  # only here: most starts are from a directory, and the import costs time
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name_or_path, allow_patterns=patterns))
    except (OSError, ValueError, RuntimeError) as error:  # no network, unknown or gated, malformed id
        reason = str(error).strip().split("\n")[0]
        if isinstance(error, LocalEntryNotFoundError):
            reason = "the hub does not answer, and its cache here has no such model"
        expected = f"a model directory, a GGUF file, a name that `farsight models` lists or a hub id ({reason})"
        raise InvalidValueError("model", name_or_path, expected) from error


def _alone_in(folder: Path) -> Path | None:
    """Returns the GGUF file of a directory that holds a single one and no ``config.json``."""
    if model_file(folder, "config.json") is not None:
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise InvalidValueError("model", str(folder), f"the path of one GGUF file, such as {found[0]}")
    return model_file(folder, found[0].name) if found else None


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    known = [*ARCHITECTURES, *VISION, *TEXTS]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise UnsupportedModelError("architectures", names, f"one of {', '.join(known)}")
    return seeing_name(raw) or str(names[0])


def _fields(raw: dict[str, Any], name: str) -> Fields:
    """The fields of a ``config.json`` by our names, with what follows from them."""
    architecture = ARCHITECTURES[name]
    spelled = {"norm_eps": "rms_norm_eps", **architecture.spelled}
    config = Fields(raw, architecture.defaults, spelled=spelled)
    return config.having(architecture.derived(config))


def _read(config: Fields, name: str, generation: dict[str, Any]) -> DecoderConfig:
    architecture = ARCHITECTURES[name]
    _check_fixed(config, architecture)
    num_layers, num_heads = config.size("num_hidden_layers", MAX_LAYERS), config.size("num_attention_heads")
    head_dim = _head_dim(config, num_heads)
    windows = architecture.windows(config, num_layers)
    rotaries = architecture.rotaries(config, head_dim, windows) if architecture.rotaries else None
    rotary = _rotary(config, architecture, head_dim) if rotaries is None else next(filter(None, rotaries), None)
    return DecoderConfig(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=_num_kv_heads(config, num_heads),
        head_dim=head_dim,
        max_position_embeddings=config.size("max_position_embeddings"),
        norm=architecture.norm,
        norm_eps=config.positive("norm_eps"),
        activation=ACTIVATIONS[config.require("hidden_act", architecture.activations)],
        rotary=rotary,
        sliding_windows=windows,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        checkpoint_dtype=_checkpoint_dtype(config),
        eos_token_ids=_eos_token_ids(config, generation),
        architecture=name,
        quantization=read_quantization(config["quantization_config"]),
        biases=of_config(architecture.biases, config),
        blocks=of_config(architecture.blocks, config),
        names=of_config(architecture.names, config),
        rotaries=rotaries,
        experts=architecture.experts(config, num_layers) if architecture.experts else None,
        latent=architecture.latent(config) if architecture.latent else None,
        shapes=architecture.shapes(config, num_layers) if architecture.shapes else None,
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
    if not architecture.rope_kinds or of_config(architecture.blocks, config).alibi:
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
