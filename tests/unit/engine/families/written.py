"""References of families that transformers runs only by programs that come with a checkpoint.

Each is written from the model's published description, layer by layer, without a KV cache: queries and keys are turned
in pairs where the description says pairs, and tensors are read by the names and in the order of published checkpoints.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

Tensors = dict[str, Tensor]

HIDDEN, HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 16, 112, 2
EPS = 1e-5
_EVERY = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "eos_token_id": 2}
_ROTARY = {"max_position_embeddings": 256, "rms_norm_eps": EPS}

WRITTEN: dict[str, dict[str, Any]] = {
    "internlm2": {
        "architectures": ["InternLM2ForCausalLM"], **_EVERY, **_ROTARY, "intermediate_size": INNER, "bias": False,
        "num_key_value_heads": 2,
    },
    "baichuan": {"architectures": ["BaiChuanForCausalLM"], **_EVERY, **_ROTARY, "intermediate_size": INNER},
    "baichuan2 7b": {"architectures": ["BaichuanForCausalLM"], **_EVERY, **_ROTARY, "intermediate_size": INNER},
    "baichuan2 13b": {
        "architectures": ["BaichuanForCausalLM"], **_EVERY, "intermediate_size": INNER, "rms_norm_eps": EPS,
        "model_max_length": 256,
    },
    "qwen 1": {
        "architectures": ["QWenLMHeadModel"], **_EVERY, "intermediate_size": 2 * INNER, "layer_norm_epsilon": EPS,
        "kv_channels": HEAD_DIM, "rotary_pct": 1.0, "no_bias": True,
    },
    "chatglm": {
        "architectures": ["ChatGLMModel"], "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_layers": LAYERS,
        "ffn_hidden_size": INNER, "kv_channels": HEAD_DIM, "seq_length": 256, "layernorm_epsilon": EPS,
        "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True, "eos_token_id": 2,
        "rope_ratio": 3.0,
    },
}  # fmt: skip
"""Fields of each model's ``config.json``."""


def save_written(out: Path, name: str) -> Tensors:
    """Writes a checkpoint of random weights with the names that published ones have; gives its tensors."""
    from tests.unit.engine.small_models import byte_level_tokenizer  # it brings transformers, which takes seconds

    tokenizer = byte_level_tokenizer()
    vocab = tokenizer.get_vocab_size()
    field = "padded_vocab_size" if name == "chatglm" else "vocab_size"
    (out / "config.json").write_text(json.dumps(WRITTEN[name] | {field: vocab}))
    tokenizer.save(str(out / "tokenizer.json"))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for key, shape in _MODELS[name].shapes(vocab).items():
        deviation = 0.5 if shape[0] == vocab else 0.2 if len(shape) == 1 else 0.15
        mean = 1.0 if len(shape) == 1 and key.endswith("weight") else 0.0
        tensors[key] = torch.empty(shape).normal_(mean, deviation, generator=generator)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return tensors


def written_logits(name: str, tensors: Tensors, ids: list[int]) -> Tensor:
    """Logits of every position of a sequence."""
    return _MODELS[name].logits(tensors, ids)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turn_halves(x: Tensor) -> Tensor:
    """``[T, heads, head_dim]``: value ``i`` turns with value ``i + head_dim / 2``."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** -(torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def turn_pairs(x: Tensor, turned: int, base: float) -> Tensor:
    """The first ``turned`` values: value ``2 i`` turns with value ``2 i + 1``, as complex numbers."""
    angles = torch.arange(len(x))[:, None] * base ** -(torch.arange(0, turned, 2) / turned)
    pairs = torch.view_as_complex(x[..., :turned].reshape(*x.shape[:-1], -1, 2).contiguous())
    moved = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)
    return torch.cat([moved, x[..., turned:]], -1)


def attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None = None) -> Tensor:
    """Causal, of ``[T, heads, head_dim]``; gives ``[T, heads * head_dim]``."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    place = torch.arange(len(query))
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (place[:, None] - place)
    scores = scores.masked_fill(place > place[:, None], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


class InternLM2:
    """Two KV heads; each one's key and value lie behind its queries in ``wqkv``."""

    def shapes(self, vocab: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"model.tok_embeddings.weight": (vocab, HIDDEN)}
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            shapes |= {
                f"{at}attention.wqkv.weight": ((HEADS + 4) * HEAD_DIM, HIDDEN),
                f"{at}attention.wo.weight": (HIDDEN, HIDDEN),
            }
            shapes |= {f"{at}feed_forward.w{n}.weight": (INNER, HIDDEN) for n in (1, 3)}
            shapes |= {f"{at}feed_forward.w2.weight": (HIDDEN, INNER)}
            shapes |= {f"{at}{norm}.weight": (HIDDEN,) for norm in ("attention_norm", "ffn_norm")}
        return shapes | {"model.norm.weight": (HIDDEN,), "output.weight": (vocab, HIDDEN)}

    def logits(self, t: Tensors, ids: list[int]) -> Tensor:
        x = t["model.tok_embeddings.weight"][ids]
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            qkv = (rms(x, t[f"{at}attention_norm.weight"]) @ t[f"{at}attention.wqkv.weight"].T).view(
                len(ids), 2, 4, HEAD_DIM
            )
            query = qkv[:, :, :2].reshape(len(ids), HEADS, HEAD_DIM)
            attended = attention(turn_halves(query), turn_halves(qkv[:, :, 2]), qkv[:, :, 3])
            x = x + attended @ t[f"{at}attention.wo.weight"].T
            w1, w2, w3 = (t[f"{at}feed_forward.w{n}.weight"].T for n in (1, 2, 3))
            y = rms(x, t[f"{at}ffn_norm.weight"])
            x = x + (F.silu(y @ w1) * (y @ w3)) @ w2
        return rms(x, t["model.norm.weight"]) @ t["output.weight"].T


class Baichuan:
    """Llama with one matrix for queries, keys and values."""

    def __init__(self, *, unit_head: bool, alibi: bool) -> None:
        self._unit_head = unit_head
        self._alibi = alibi

    def shapes(self, vocab: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN)}
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            shapes |= {
                f"{at}self_attn.W_pack.weight": (3 * HIDDEN, HIDDEN),
                f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            }
            shapes |= {f"{at}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
            shapes |= {f"{at}mlp.down_proj.weight": (HIDDEN, INNER)}
            shapes |= {f"{at}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab, HIDDEN)}

    def logits(self, t: Tensors, ids: list[int]) -> Tensor:
        x = t["model.embed_tokens.weight"][ids]
        slopes = torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(HEADS)]) if self._alibi else None
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            packed = rms(x, t[f"{at}input_layernorm.weight"]) @ t[f"{at}self_attn.W_pack.weight"].T
            query, key, value = packed.view(len(ids), 3, HEADS, HEAD_DIM).unbind(1)
            if not self._alibi:
                query, key = turn_halves(query), turn_halves(key)
            x = x + attention(query, key, value, slopes) @ t[f"{at}self_attn.o_proj.weight"].T
            gate, up, down = (t[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
            y = rms(x, t[f"{at}post_attention_layernorm.weight"])
            x = x + (F.silu(y @ gate) * (y @ up)) @ down
        head = t["lm_head.weight"]
        if self._unit_head:
            head = head / head.pow(2).sum(-1, keepdim=True).sqrt()
        return rms(x, t["model.norm.weight"]) @ head.T


class Qwen1:
    """``w1(y) * silu(w2(y))``; a bias for queries, keys and values alone."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        self._hidden = hidden

    def shapes(self, vocab: int) -> dict[str, tuple[int, ...]]:
        hidden = self._hidden
        shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (vocab, hidden)}
        for i in range(LAYERS):
            at = f"transformer.h.{i}."
            shapes |= {f"{at}attn.c_attn.weight": (3 * hidden, hidden), f"{at}attn.c_attn.bias": (3 * hidden,)}
            shapes |= {f"{at}attn.c_proj.weight": (hidden, hidden), f"{at}mlp.c_proj.weight": (hidden, INNER)}
            shapes |= {f"{at}mlp.w{n}.weight": (INNER, hidden) for n in (1, 2)}
            shapes |= {f"{at}ln_{n}.weight": (hidden,) for n in (1, 2)}
        return shapes | {"transformer.ln_f.weight": (hidden,), "lm_head.weight": (vocab, hidden)}

    def logits(self, t: Tensors, ids: list[int]) -> Tensor:
        return self.logits_of_rows(t, t["transformer.wte.weight"][ids])

    def logits_of_rows(self, t: Tensors, x: Tensor) -> Tensor:
        """The same from embeddings, or from what stands in their place."""
        for i in range(LAYERS):
            at = f"transformer.h.{i}."
            packed = F.linear(rms(x, t[f"{at}ln_1.weight"]), t[f"{at}attn.c_attn.weight"], t[f"{at}attn.c_attn.bias"])
            query, key, value = (each.view(len(x), HEADS, -1) for each in packed.split(self._hidden, -1))
            x = x + attention(turn_halves(query), turn_halves(key), value) @ t[f"{at}attn.c_proj.weight"].T
            y = rms(x, t[f"{at}ln_2.weight"])
            inner = (y @ t[f"{at}mlp.w1.weight"].T) * F.silu(y @ t[f"{at}mlp.w2.weight"].T)
            x = x + inner @ t[f"{at}mlp.c_proj.weight"].T
        return rms(x, t["transformer.ln_f.weight"]) @ t["lm_head.weight"].T


class ChatGLM:
    """Half of each head turns, in neighbouring pairs; two KV heads behind all queries."""

    def shapes(self, vocab: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"transformer.embedding.word_embeddings.weight": (vocab, HIDDEN)}
        for i in range(LAYERS):
            at = f"transformer.encoder.layers.{i}."
            packed = (HEADS + 4) * HEAD_DIM
            shapes |= {
                f"{at}self_attention.query_key_value.weight": (packed, HIDDEN),
                f"{at}self_attention.query_key_value.bias": (packed,),
            }
            shapes |= {f"{at}self_attention.dense.weight": (HIDDEN, HIDDEN)}
            shapes |= {
                f"{at}mlp.dense_h_to_4h.weight": (2 * INNER, HIDDEN),
                f"{at}mlp.dense_4h_to_h.weight": (HIDDEN, INNER),
            }
            shapes |= {f"{at}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes["transformer.encoder.final_layernorm.weight"] = (HIDDEN,)
        return shapes | {"transformer.output_layer.weight": (vocab, HIDDEN)}

    def logits(self, t: Tensors, ids: list[int]) -> Tensor:
        x = t["transformer.embedding.word_embeddings.weight"][ids]
        for i in range(LAYERS):
            at = f"transformer.encoder.layers.{i}."
            weight, bias = (t[f"{at}self_attention.query_key_value.{kind}"] for kind in ("weight", "bias"))
            heads = F.linear(rms(x, t[f"{at}input_layernorm.weight"]), weight, bias).view(len(ids), -1, HEAD_DIM)
            query, key = (
                turn_pairs(each, HEAD_DIM // 2, 30000.0) for each in (heads[:, :HEADS], heads[:, HEADS : HEADS + 2])
            )
            x = x + attention(query, key, heads[:, HEADS + 2 :]) @ t[f"{at}self_attention.dense.weight"].T
            y = rms(x, t[f"{at}post_attention_layernorm.weight"]) @ t[f"{at}mlp.dense_h_to_4h.weight"].T
            x = x + (F.silu(y[:, :INNER]) * y[:, INNER:]) @ t[f"{at}mlp.dense_4h_to_h.weight"].T
        return rms(x, t["transformer.encoder.final_layernorm.weight"]) @ t["transformer.output_layer.weight"].T


_MODELS: dict[str, Any] = {
    "internlm2": InternLM2(),
    "baichuan": Baichuan(unit_head=False, alibi=False),
    "baichuan2 7b": Baichuan(unit_head=True, alibi=False),
    "baichuan2 13b": Baichuan(unit_head=True, alibi=True),
    "qwen 1": Qwen1(),
    "chatglm": ChatGLM(),
}
