"""The structures of ``interface.h``, field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class _Config(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("bf16", "num_layers", "hidden", "intermediate", "vocab", "heads", "kv_heads")),
        *((name, c_int32) for name in ("head_dim", "block_size", "layer_norm", "activation", "num_threads")),
        *((name, c_int32) for name in ("kv_int8", "gated", "parallel", "row_norm", "latent")),
        *((name, c_float) for name in ("norm_eps", "embedding_scale", "residual_scale", "logit_scale")),
        *((name, c_float) for name in ("attention_scale", "attention_cap", "logit_cap")),
        *((name, c_float) for name in ("gate_limit", "gate_alpha")),
        *((name, c_void_p) for name in ("slopes", "embedding", "positions")),
        ("embedding_norm", _Norm),
        *((name, c_void_p) for name in ("query_scales", "states")),
        ("state_size", c_int64),
    )


class _Quantized(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("values", "scales", "minima")),
        *((name, c_int32) for name in ("n", "k", "bits", "group")),
    )


class _Linear(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int32) for name in ("n", "k")),
        ("parts", POINTER(_Quantized)),
        ("num_parts", c_int32),
    )


class _Experts(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("count", "active", "normalized", "shared_gate", "sigmoid")),
        *((name, c_int32) for name in ("groups", "active_groups", "group_best")),
        ("scale", c_float),
        ("correction", c_void_p),
        ("router", _Linear),
        *((name, POINTER(_Linear)) for name in ("up", "down")),
        *((name, c_void_p) for name in ("router_norm", "scales")),
        *((name, _Norm) for name in ("before", "after_mlp", "after")),
    )


class _Mixer(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kind", "length", "convolved", "mixed")),
        *((name, c_int32) for name in ("key_heads", "value_heads", "key", "value", "tiled")),
        *((name, c_void_p) for name in ("taps", "bias", "rates", "steps", "norm")),
        ("first", c_int64),
    )


class _Inputs(Structure):
    _fields_ = (
        ("embedding", c_void_p),
        ("projection", _Linear),
        ("norm", c_void_p),
        ("width", c_int32),
        ("scale", c_float),
    )


class _Latent(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q_norm", "kv_norm")),
        *((name, _Linear) for name in ("q_up", "keys", "values")),
        ("head_stride", c_int32),
    )


class _Layer(Structure):
    _fields_ = (
        *((name, _Norm) for name in ("input_norm", "post_norm", "after_attention", "after_mlp")),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        *((name, _Linear) for name in ("qkv", "out", "up", "down")),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int32) for name in ("rotary_dim", "window")),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("sinks", c_void_p),
        ("experts", _Experts),
        ("latent", _Latent),
        ("mixer", _Mixer),
        *((name, c_int32) for name in ("head_dim", "kv_heads", "keeps_kv", "gated")),
        ("v_norm", c_void_p),
        *((name, _Linear) for name in ("inputs_gate", "inputs_out")),
        ("inputs_norm", _Norm),
        ("scale", c_float),
    )


class _Step(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_items", "num_samples")),
        *((name, c_void_p) for name in ("token_ids", "positions", "slot_ids", "lengths", "tables")),
        ("width", c_int32),
        *((name, c_void_p) for name in ("state_rows", "state_keeps")),
        ("num_keeps", c_int32),
        *((name, c_void_p) for name in ("sample_rows", "logits", "best", "hidden", "middle")),
        *((name, c_void_p) for name in ("given_of", "given", "given_cos", "given_sin")),
        ("cut_off_at_s", c_double),
    )
