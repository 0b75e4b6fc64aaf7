"""An encoder in a GGUF file: what it says in the words of a ``config.json``, and its tensors. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farsight.engine.checkpoint.config_fields import CheckpointError, Shape, UnsupportedModelError
from farsight.engine.checkpoint.gguf_model import GGUFKeys, gguf_dtype
from farsight.tokenization.gguf_file import GGUFFile, GGUFTensor

GGUF_ENCODERS: Mapping[str, str] = {"bert": "BertModel", "nomic-bert": "NomicBertModel"}
"""By ``general.architecture``: a key of ``ENCODERS``."""

_POOLING = {1: "mean", 2: "cls", 3: "last"}
"""By ``pooling_type``; 0 is none, and 4 a score."""

_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.qkv": "attn_qkv",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "gate.dense": "ffn_gate",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
"""In transformers, in a layer and in the whole: the file's names."""


def gguf_encoder_config(file: GGUFFile) -> tuple[dict[str, Any], str]:
    """Returns the fields of a ``config.json`` that describe the same encoder, and how its states are pooled.

    Raises:
        UnsupportedModelError: A feature that is not computed.
        GGUFError: A field is missing, or has the wrong kind.
    """
    keys = GGUFKeys(file, file.metadata["general.architecture"])
    keys.require({"attention.causal": False})
    pooling = keys.size("pooling_type", 0) or 1
    if pooling not in _POOLING:
        raise UnsupportedModelError(f"{keys.name}.pooling_type", pooling, f"one of {', '.join(map(str, _POOLING))}")
    raw = {
        "architectures": [GGUF_ENCODERS[keys.name]],
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": keys.size("attention.head_count"),
        "max_position_embeddings": keys.size("context_length"),
        "type_vocab_size": _shape(file, "token_types.weight")[0],
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "dtype": gguf_dtype(file),
    }
    return raw, _POOLING[pooling]


def gguf_encoder_tensors(file: GGUFFile, shapes: Mapping[str, Shape]) -> dict[str, GGUFTensor]:
    """Returns the tensors by their names in transformers.

    Args:
        shapes: Those that the encoder has.

    Raises:
        CheckpointError: A tensor is missing, has another shape, or is none of the encoder's.
    """
    names = {name: _gguf_name(name) for name in shapes}
    unknown = sorted(file.tensors.keys() - set(names.values()))
    if unknown:
        raise CheckpointError(unknown[0], "a tensor of that name", "only those of an encoder that makes embeddings")
    found = {}
    for name, shape in shapes.items():
        stored = _shape(file, names[name])
        if stored != shape:
            raise CheckpointError(names[name], list(stored), f"a tensor of shape {list(shape)}")
        found[name] = file.tensors[names[name]]
    return found


def _gguf_name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if not stem.startswith("encoder.layer."):
        return f"{_NAMES[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{end}"


def _shape(file: GGUFFile, name: str) -> Shape:
    if name not in file.tensors:
        raise CheckpointError(name, "nothing", "a tensor of that name")
    return file.tensors[name].shape
