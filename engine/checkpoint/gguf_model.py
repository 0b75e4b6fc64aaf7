"""What a GGUF file says about its model, in the words of a ``config.json``.

Knows no torch. Only the factors of rotary embeddings are read from the file's data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from farsight.engine.checkpoint.config_fields import CheckpointError, UnsupportedModelError
from farsight.engine.checkpoint.families import ARCHITECTURES
from farsight.engine.checkpoint.families.gguf import GGUF_FAMILIES, GGUFFamily
from farsight.tokenization.gguf_file import GGUFFile, GGUFTensor
from farsight.tokenization.gguf_texts import gguf_end_ids

_ELSEWHERE = "serve it with llama.cpp behind [[replica]]"
_FAMILY_ELSEWHERE = f"take the model's safetensors directory, whose families are more, or {_ELSEWHERE}"
_EPS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
_WINDOW = "attention.sliding_window"
_QUERIES = "attention.temperature_scale"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_PLAIN_YARN = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    _LOG_MULTIPLIER: 0.0,
}


def gguf_family(file: GGUFFile) -> GGUFFamily:
    """Returns how the file holds its model.

    Raises:
        UnsupportedModelError: Another architecture.
        GGUFError: A field has the wrong kind.
    """
    name = file.value("general.architecture", str)
    if name not in GGUF_FAMILIES:
        known = f"one of {', '.join(GGUF_FAMILIES)}: {_FAMILY_ELSEWHERE}"
        raise UnsupportedModelError("general.architecture", name, known)
    family = GGUF_FAMILIES[name]
    for key, other in family.others.items():
        value = file.metadata.get(f"{name}.{key}", 0)
        if isinstance(value, int | float) and value > 0:
            family = other
    return family


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the fields of a ``config.json`` that describe the same model.

    Raises:
        UnsupportedModelError: Another architecture, or a feature that the engine does not compute.
        GGUFError: A field is missing, or has the wrong kind.
    """
    family = gguf_family(file)
    record = ARCHITECTURES[family.architecture]
    keys = GGUFKeys(file, file.metadata["general.architecture"])
    _check_only(keys, family)
    heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    embedding = _tensor(file, "token_embd.weight")
    head_dim = keys.size("attention.key_length", hidden // heads)
    num_layers = keys.size("block_count") - keys.size("nextn_predict_layers", 0)  # those guess further tokens
    if num_layers > len(file.tensors):  # before anything is made of each layer
        raise keys.error("block_count", f"at most the file's {len(file.tensors)} tensors")
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"the key_length, {head_dim}")
    biased = any(keys.has(f"blk.{i}.attn_q.bias") for i in range(num_layers))
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.sizes(
            "feed_forward_length",
            num_layers,
            None if record.experts is None else record.defaults.get("intermediate_size"),
        )[0],
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, *keys.sizes("attention.head_count_kv", num_layers, heads)),
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        record.spelled.get("norm_eps", "rms_norm_eps"): keys.number(_EPS[record.norm]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": gguf_dtype(file),
        "eos_token_id": list(gguf_end_ids(file)),
        "attention_bias": biased,
        "qkv_bias": biased,
        "mlp_bias": _has(file, "ffn_up.bias"),
        "rope_parameters": _rope(keys, head_dim, family),
    }
    raw |= {field: keys.size(key) for field, key in family.sizes.items()}
    raw |= {field: keys.number(key) for field, key in family.numbers.items()}
    raw |= {field: keys.number(key) for field, key in family.optional.items() if keys.given(key)}
    raw |= family.fixed
    if family.derived is not None:
        raw |= family.derived(keys, num_layers)
    if "query_pre_attn_scalar" in record.defaults:
        raw["query_pre_attn_scalar"] = hidden // heads if num_layers == family.scaled_by_width else head_dim
    if "moe_intermediate_size" in family.sizes:
        raw["mlp_only_layers"] = [i for i in range(num_layers) if f"blk.{i}.ffn_gate.weight" in file.tensors]
    if "original_max_position_embeddings" in record.defaults:  # beside the nested object, where it has a default
        length = keys.size("rope.scaling.original_context_length", raw["max_position_embeddings"])
        raw["original_max_position_embeddings"] = length
    return raw | dict(_windows(keys, family, num_layers))


def _windows(keys: GGUFKeys, family: GGUFFamily, num_layers: int) -> Iterator[tuple[str, Any]]:
    if family.full_every is None:
        return
    window = keys.size(_WINDOW, 0)
    if not family.full_every:
        yield "sliding_window", window or None
        return
    if window:
        yield "sliding_window", window
    slides = keys.flags(f"{_WINDOW}_pattern", num_layers)
    if slides is None:
        period = keys.size(f"{_WINDOW}_pattern", family.full_every)
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    yield "layer_types", ["sliding_attention" if each and window else "full_attention" for each in slides]


def rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """Returns what each frequency is divided by; None if the file has no such factors."""
    tensor = file.tensors.get("rope_freqs.weight")
    return None if tensor is None else tuple(_floats(file, tensor))


def _check_only(keys: GGUFKeys, family: GGUFFamily) -> None:
    """Refuses parts of a model, and what is not computed."""
    parts = keys.file.value("split.count", int, 0)
    if parts > 1:
        raise keys.file.error("split.count", parts, "1: join the parts with llama-gguf-split --merge")
    only = dict(family.only)
    if ARCHITECTURES[family.architecture].experts is None:
        only |= {"expert_count": 0, "expert_used_count": 0}
    keys.require(only)


class GGUFKeys:
    """Metadata of one architecture."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        self.file = file
        self.name = name

    def size(self, key: str, default: int | None = None) -> int:
        found: int | None = self.file.value(f"{self.name}.{key}", int, default)
        if found is None or (found < 1 and default != 0):
            raise self.error(key, "an integer >= 1")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found: float | None = self.file.value(f"{self.name}.{key}", float, default)
        if found is None or not 0 < found < float("inf"):
            raise self.error(key, "a number > 0")
        return found

    def require(self, only: Mapping[str, object]) -> None:
        """Refuses other values; a missing one is fine."""
        for key, value in only.items():
            found = self.file.value(f"{self.name}.{key}", type(value), value)
            if found != value:
                raise UnsupportedModelError(f"{self.name}.{key}", found, f"{value}: {_ELSEWHERE}")

    def given(self, key: str) -> bool:
        """Says whether there is a number, and not 0."""
        return bool(self.file.value(f"{self.name}.{key}", float, 0.0))

    def flags(self, key: str, length: int) -> list[bool] | None:
        """Returns an array of so many values that are true or false; None where there is no array."""
        if not isinstance(self.file.metadata.get(f"{self.name}.{key}"), np.ndarray):
            return None
        return [bool(each) for each in self.file.numbers(f"{self.name}.{key}", length, 0)]

    def flag(self, key: str, default: bool) -> bool:
        found: bool = self.file.value(f"{self.name}.{key}", bool, default)
        return found

    def sizes(self, key: str, length: int, default: int | None = None) -> list[int]:
        """Returns an array of integers by layer, or the only one that stands in its place, alone."""
        if not isinstance(self.file.metadata.get(f"{self.name}.{key}"), np.ndarray):
            return [self.size(key, default)]
        return list(map(int, self.file.numbers(f"{self.name}.{key}", length, 0)))

    def factors(self) -> tuple[float, ...] | None:
        """Returns what each frequency is divided by; None if the file does not say."""
        return rope_factors(self.file)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def text(self, key: str) -> str | None:
        found: str | None = self.file.value(f"{self.name}.{key}", str)
        return found

    def error(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.name}.{key}", self.file.metadata.get(f"{self.name}.{key}"), expected)


def _rope(keys: GGUFKeys, head_dim: int, family: GGUFFamily) -> dict[str, Any]:
    """Returns ``rope_parameters``; factors of Llama 3's kind are not among them, see ``rope_factors``."""
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    turned = keys.size("rope.dimension_count", head_dim)
    if ARCHITECTURES[family.architecture].partial_rotary:
        rope["partial_rotary_factor"] = turned / head_dim
    elif turned != head_dim:
        raise keys.error("rope.dimension_count", f"the heads' size, {head_dim}")
    if "rope_factors_short.weight" in keys.file.tensors:
        return rope | _longrope(keys)
    kind = keys.text("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "yarn":
        return rope | _yarn(keys, factor, truncates=family.yarn_truncates)
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise keys.error("rope.scaling.type", f"none, linear or yarn: {_ELSEWHERE}")
    return rope | {"rope_type": "default"}


def _yarn(keys: GGUFKeys, factor: float, *, truncates: bool) -> dict[str, Any]:
    scales_queries = keys.given(_QUERIES)
    keys.require({key: value for key, value in _PLAIN_YARN.items() if key != _LOG_MULTIPLIER or not scales_queries})
    own: dict[str, Any] = {}
    if scales_queries:
        scale = keys.number(_LOG_MULTIPLIER, 1.0)
        own = {"llama_4_scaling_beta": keys.number(_QUERIES), "mscale": scale, "mscale_all_dim": scale}
    return own | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": truncates,
    }


def _longrope(keys: GGUFKeys) -> dict[str, Any]:
    short, long = (
        list(_floats(keys.file, _tensor(keys.file, f"rope_factors_{kind}.weight"))) for kind in ("short", "long")
    )
    original = keys.size("rope.scaling.original_context_length")
    rope = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    if f"{keys.name}.rope.scaling.attn_factor" in keys.file.metadata:
        rope["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return rope


def _tensor(file: GGUFFile, name: str) -> GGUFTensor:
    if name not in file.tensors or len(file.tensors[name].shape) > 2:
        raise file.error(name, "nothing", "a tensor of that name")
    return file.tensors[name]


def _floats(file: GGUFFile, tensor: GGUFTensor) -> list[float]:
    if tensor.kind != "F32" or tensor.num_bytes > 1 << 16:
        raise file.error(tensor.name, f"{tensor.kind} {tensor.shape}", "some numbers in F32")
    with file.path.open("rb") as data:
        data.seek(tensor.begin)
        values = np.frombuffer(data.read(tensor.num_bytes), "<f4")
    if not np.isfinite(values).all() or not (values > 0).all():
        raise file.error(tensor.name, "other values", "numbers > 0")
    return [float(value) for value in values]


def _has(file: GGUFFile, part: str) -> bool:
    return f"blk.0.{part}" in file.tensors


def gguf_dtype(file: GGUFFile) -> str:
    """Returns the float type of the matrices, of several the one of 16 bits; bfloat16 where they are quantised."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"
