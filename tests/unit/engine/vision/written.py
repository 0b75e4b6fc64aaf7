"""References of families that see and that transformers runs only by programs that come with a checkpoint.

Each is written from the model's published description, one picture and one layer at a time, with torch's own modules
where the description names them; tensors have the names and the order of published checkpoints.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.engine.families.written import EPS, INNER, LAYERS, Qwen1, Tensors
from tests.unit.engine.small_models import byte_level_tokenizer
from tests.unit.engine.vision.models import IMAGE_ID

HIDDEN, WIDTH, TOWER_HEADS, TOWER_LAYERS, MLP_RATIO = 128, 48, 4, 3, 1.51
SIDE, PATCH, QUERIES = 28, 4, 9
VOCAB = 320

QWEN_VL: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 2 * INNER,
    "layer_norm_epsilon": EPS,
    "kv_channels": HIDDEN // 4,
    "no_bias": True,
    "rotary_pct": 1.0,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "visual": {
        "heads": TOWER_HEADS,
        "image_size": SIDE,
        "image_start_id": IMAGE_ID - 2,
        "layers": TOWER_LAYERS,
        "mlp_ratio": MLP_RATIO,
        "n_queries": QUERIES,
        "output_dim": HIDDEN,
        "patch_size": PATCH,
        "width": WIDTH,
    },
}
"""Fields of ``config.json``: the names are those of Qwen-VL-Chat's."""

AT = "transformer.visual."
_TEXT = Qwen1(HIDDEN)


def _tower_shapes() -> dict[str, tuple[int, ...]]:
    inner = int(WIDTH * MLP_RATIO)
    shapes: dict[str, tuple[int, ...]] = {
        "conv1.weight": (WIDTH, 3, PATCH, PATCH),
        "positional_embedding": (256, WIDTH),
        "attn_pool.query": (QUERIES, HIDDEN),
        "attn_pool.kv_proj.weight": (HIDDEN, WIDTH),
        "attn_pool.attn.in_proj_weight": (3 * HIDDEN, HIDDEN),
        "attn_pool.attn.in_proj_bias": (3 * HIDDEN,),
        "attn_pool.attn.out_proj.weight": (HIDDEN, HIDDEN),
        "attn_pool.attn.out_proj.bias": (HIDDEN,),
        "proj": (HIDDEN, HIDDEN),
    }
    norms = {"ln_pre": WIDTH, "ln_post": HIDDEN, "attn_pool.ln_q": HIDDEN, "attn_pool.ln_kv": HIDDEN}
    for i in range(TOWER_LAYERS):
        at = f"transformer.resblocks.{i}."
        norms |= {f"{at}ln_1": WIDTH, f"{at}ln_2": WIDTH}
        for name, outputs, inputs in (
            ("attn.in_proj", 3 * WIDTH, WIDTH),
            ("attn.out_proj", WIDTH, WIDTH),
            ("mlp.c_fc", inner, WIDTH),
            ("mlp.c_proj", WIDTH, inner),
        ):
            shapes |= {f"{at}{name}.weight": (outputs, inputs), f"{at}{name}.bias": (outputs,)}
    for name, size in norms.items():
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return {AT + name: shape for name, shape in shapes.items()}


def sincos_places(size: int, side: int) -> Tensor:
    """``[side * side, size]``: the first half follows from the column, the second from the row; of each, sines and
    then cosines of ``n / 10000^(2i / (size / 2))``."""

    def of(number: int) -> list[float]:
        angles = [number / 10000 ** (i / (size / 4)) for i in range(size // 4)]
        return [math.sin(each) for each in angles] + [math.cos(each) for each in angles]

    return torch.tensor([of(column) + of(row) for row in range(side) for column in range(side)])


def save_written_seeing(out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a checkpoint of random weights with the names that published ones have."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(5)
    tensors: Tensors = {}
    for key, shape in (_TEXT.shapes(VOCAB) | _tower_shapes()).items():
        is_norm = key.endswith("weight") and len(shape) == 1
        deviation = 0.5 if "wte" in key else 0.15 if len(shape) == 1 else 1.5 / math.prod(shape[1:]) ** 0.5
        tensors[key] = torch.empty(shape).normal_(float(is_norm), deviation, generator=generator)
    tensors[f"{AT}attn_pool.pos_embed"] = sincos_places(HIDDEN, math.isqrt(QUERIES))
    for name in ("transformer.wte.weight", "lm_head.weight"):
        tensors[name][IMAGE_ID - 2 :] = 0  # nothing that belongs to a picture is ever likely
    save_file({name: each.to(dtype) for name, each in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(QWEN_VL))
    byte_level_tokenizer().save(str(out / "tokenizer.json"))
    return out


class WrittenReference:
    """Qwen-VL with its text model, from a saved checkpoint in float32."""

    def __init__(self, model_dir: Path) -> None:
        from safetensors.torch import load_file

        self._tensors = {name: each.float() for name, each in load_file(model_dir / "model.safetensors").items()}

    def _at(self, name: str) -> Tensor:
        return self._tensors[AT + name]

    def pixels(self, rgb: np.ndarray) -> Tensor:
        """``[3, side, side]``: all of it stretched to the square, between 0 and 1, then normalised as for CLIP."""
        square = np.asarray(Image.fromarray(rgb).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
        std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
        return (torch.tensor(square).permute(2, 0, 1) / 255 - mean) / std

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self._at(f"{name}.weight"), self._at(f"{name}.bias"), 1e-6)

    def _dense(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._at(f"{name}.weight"), self._at(f"{name}.bias"))

    @torch.no_grad()
    def rows(self, rgb: np.ndarray) -> Tensor:
        """``[queries, hidden]`` of one picture."""
        x = F.conv2d(self.pixels(rgb)[None], self._at("conv1.weight"), stride=PATCH)[0].flatten(1).T
        x = self._norm(x + between(self._at("positional_embedding"), SIDE // PATCH), "ln_pre")
        for i in range(TOWER_LAYERS):
            at = f"transformer.resblocks.{i}."
            x = x + self._attention(self._norm(x, f"{at}ln_1"), f"{at}attn.")
            x = x + self._dense(F.gelu(self._dense(self._norm(x, f"{at}ln_2"), f"{at}mlp.c_fc")), f"{at}mlp.c_proj")
        return self._norm(self._resample(x), "ln_post") @ self._at("proj")

    def _attention(self, x: Tensor, at: str) -> Tensor:
        """Head by head: each one's query, key and value lie beside each other."""
        packed = self._dense(x, f"{at}in_proj")
        size = WIDTH // TOWER_HEADS
        heads = []
        for head in packed.split(3 * size, -1):
            query, key, value = head.split(size, -1)
            heads.append((query @ key.T / math.sqrt(size)).softmax(-1) @ value)
        return self._dense(torch.cat(heads, -1), f"{at}out_proj")

    def _resample(self, x: Tensor) -> Tensor:
        attention = nn.MultiheadAttention(HIDDEN, HIDDEN // 128)
        attention.load_state_dict(
            {
                name: self._at(f"attn_pool.attn.{name}")
                for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
            }
        )
        places = sincos_places(HIDDEN, math.isqrt(QUERIES))
        values = self._norm(x @ self._at("attn_pool.kv_proj.weight").T, "attn_pool.ln_kv")
        queries = self._norm(self._at("attn_pool.query"), "attn_pool.ln_q") + places
        found: Tensor = attention(queries, values + between(places, SIDE // PATCH), values)[0]
        return found

    @torch.no_grad()
    def logits(self, ids: list[int], images: list[np.ndarray]) -> Tensor:
        """Those of every position; runs of placeholders take the rows of the pictures in turn."""
        x = self._tensors["transformer.wte.weight"][ids].clone()
        places = [index for index, token in enumerate(ids) if token == IMAGE_ID]
        if images:
            x[places] = torch.cat([self.rows(rgb) for rgb in images])
        return _TEXT.logits_of_rows(self._tensors, x)


def between(places: Tensor, side: int) -> Tensor:
    """Positions of a square of ``side`` patches between those of another one."""
    stored = math.isqrt(len(places))
    if stored == side:
        return places
    square = places.T.reshape(1, -1, stored, stored)
    return F.interpolate(square, (side, side), mode="bicubic", align_corners=False)[0].flatten(1).T
