"""CLIP's tower and LLaVA's projector, with the tiles of LLaVA-NeXT. Torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.vision.anyres import AnyresPixels, read_anyres
from farsight.engine.vision.geometry import PreparedImage
from farsight.engine.vision.layers import ACTIVATIONS, Dense, LayerNorm, TowerTensors
from farsight.engine.vision.pixels import class_rows

_MAX_LAYERS = 1 << 10
_SQUARES = 16
"""Squares that are computed at a time: the products of more are no faster."""

_CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0,
    "model_type": "clip_vision_model",
}


@dataclass(frozen=True, slots=True)
class _Layer:
    norm1: LayerNorm
    queries: Dense
    keys: Dense
    values: Dense
    out: Dense
    norm2: LayerNorm
    up: Dense
    down: Dense


class ClipTower:
    """One of LLaVA's towers with its projector.

    Args:
        raw: The object in ``config.json``.
        tensors: Those of tower and projector.

    Raises:
        UnsupportedModelError: A tower that is not computed; names the field.
        CheckpointError: A missing or odd tensor.
    """

    def __init__(self, raw: dict[str, Any], tensors: TowerTensors) -> None:
        whole = Fields(raw, {"projector_hidden_act": "gelu", "multimodal_projector_bias": True})
        config = Fields(raw.get("vision_config") or {}, _CLIP, "vision_config.")
        config.require("model_type", ("clip_vision_model",))
        config.require("num_channels", (3,))
        self._drops_class = not class_rows(raw)
        self._act = ACTIVATIONS[config.require("hidden_act", ACTIVATIONS)]
        self._hidden = config.size("hidden_size")
        self._heads = config.size("num_attention_heads")
        if self._hidden % self._heads:
            raise config.error("hidden_size", f"a multiple of the {self._heads} attention heads")
        self._patch = config.size("patch_size", 1 << 12)
        self._patches = config.size("image_size", 1 << 12) // self._patch
        num_layers = config.size("num_hidden_layers", _MAX_LAYERS)
        self._features = _feature_layers(whole, num_layers)
        name = "vision_tower.vision_model." if tensors.has(_EMBEDDED.format("vision_model.")) else "vision_tower."
        self._take(config, name, tensors, max(self._features))
        tensors.ignore(f"{name}post_layernorm.", *(f"{name}encoder.layers.{i}." for i in range(num_layers)))
        text = raw.get("text_config") or {}
        self.hidden_size = Fields(text, {"hidden_size": 4096}, "text_config.").size("hidden_size")
        self._project(whole, tensors)
        family = (raw.get("architectures") or [""])[0]
        self._tiles: AnyresPixels | None = None
        if family == "LlavaNextForConditionalGeneration":
            if not self._drops_class:
                raise whole.error("vision_feature_select_strategy", '"default": tiles have no class token')
            self._tiles = read_anyres(raw, {})
            self._newline = tensors.take("image_newline", self.hidden_size)

    def _take(self, config: Fields, name: str, tensors: TowerTensors, num_layers: int) -> None:
        hidden, eps, inner = self._hidden, config.positive("layer_norm_eps"), config.size("intermediate_size")
        embeddings = f"{name}embeddings."
        kernel = tensors.take(f"{embeddings}patch_embedding.weight", hidden, 3, self._patch, self._patch)
        self._kernel = kernel.reshape(hidden, -1)
        self._class = tensors.take(f"{embeddings}class_embedding", hidden)
        self._places = tensors.take(f"{embeddings}position_embedding.weight", self._patches**2 + 1, hidden)
        self._pre_norm = LayerNorm.take(tensors, f"{name}pre_layrnorm", hidden, eps)
        self._layers = []
        for index in range(num_layers):
            layer = f"{name}encoder.layers.{index}."
            queries, keys, values = (
                Dense.take(tensors, f"{layer}self_attn.{each}_proj", hidden, hidden) for each in "qkv"
            )
            self._layers.append(
                _Layer(
                    LayerNorm.take(tensors, f"{layer}layer_norm1", hidden, eps),
                    queries,
                    keys,
                    values,
                    Dense.take(tensors, f"{layer}self_attn.out_proj", hidden, hidden),
                    LayerNorm.take(tensors, f"{layer}layer_norm2", hidden, eps),
                    Dense.take(tensors, f"{layer}mlp.fc1", inner, hidden),
                    Dense.take(tensors, f"{layer}mlp.fc2", hidden, inner),
                )
            )

    def _project(self, whole: Fields, tensors: TowerTensors) -> None:
        bias, size = whole.flag("multimodal_projector_bias"), self.hidden_size
        inputs, name = self._hidden * len(self._features), "multi_modal_projector.linear_"
        self._first = Dense.take(tensors, f"{name}1", size, inputs, bias=bias)
        self._second = Dense.take(tensors, f"{name}2", size, size, bias=bias)
        self._project_act = ACTIVATIONS[whole.require("projector_hidden_act", ACTIVATIONS)]

    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        squares = [torch.from_numpy(image.pixels) for image in images]
        counts = [len(each) for each in squares]
        pixels = torch.cat(squares).to(self._kernel)
        rows = torch.cat([self._rows(part) for part in torch.split(pixels, _SQUARES)])
        return [self._packed(part, image) for part, image in zip(torch.split(rows, counts), images, strict=True)]

    def _rows(self, pixels: Tensor) -> Tensor:
        """Computes ``[squares, tokens, hidden of the text model]`` of ``[squares, 3, side, side]``."""
        hidden = self._pre_norm(self._embedded(pixels))
        found = {0: hidden} if 0 in self._features else {}
        for index, layer in enumerate(self._layers, 1):
            hidden = self._through(layer, hidden)
            if index in self._features:
                found[index] = hidden
        features = torch.cat([found[index] for index in self._features], -1)
        if self._drops_class:
            features = features[:, 1:]
        return self._second(self._project_act(self._first(features)))

    def _embedded(self, pixels: Tensor) -> Tensor:
        count, side, patch = self._patches, self._patches * self._patch, self._patch
        cut = pixels[:, :, :side, :side].reshape(-1, 3, count, patch, count, patch).permute(0, 2, 4, 1, 3, 5)
        patches = F.linear(cut.reshape(len(pixels), count * count, -1), self._kernel)
        first = self._class.expand(len(pixels), 1, -1)
        return torch.cat([first, patches], 1) + self._places

    def _through(self, layer: _Layer, hidden: Tensor) -> Tensor:
        normed = layer.norm1(hidden)
        shape = (*hidden.shape[:2], self._heads, -1)
        query, key, value = (each(normed).view(shape) for each in (layer.queries, layer.keys, layer.values))
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        attended = attended.transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + layer.out(attended)
        return hidden + layer.down(self._act(layer.up(layer.norm2(hidden))))

    def _packed(self, rows: Tensor, image: PreparedImage) -> Tensor:
        """Returns the rows of one image: of its square, then of its tiles; a token ends each row of patches."""
        if self._tiles is None:
            return rows[0]
        tiles, side = self._tiles, self._patches
        high, wide = tiles.best(*image.size)
        rows_of, columns = high // tiles.side, wide // tiles.side
        whole = (
            rows[1:].view(rows_of, columns, side, side, -1).transpose(1, 2).reshape(rows_of * side, columns * side, -1)
        )
        top, left = tiles.unpadded(*image.size, *whole.shape[:2])
        kept = whole[top : len(whole) - top, left : whole.shape[1] - left]
        ended = torch.cat([kept, self._newline.expand(len(kept), 1, -1)], 1)
        return torch.cat([rows[0], ended.flatten(0, 1)])


_EMBEDDED = "vision_tower.{}embeddings.class_embedding"


def _feature_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers behind which rows are read, 0 for none."""
    value = config["vision_feature_layer"]
    value = -2 if value is None else value
    chosen: list[Any] = value if isinstance(value, list) and value else [value]
    if not all(type(each) is int and -num_layers - 1 <= each <= num_layers for each in chosen):
        raise config.error("vision_feature_layer", f"layers from {-num_layers - 1} to {num_layers}")
    return tuple(each if each >= 0 else num_layers + 1 + each for each in chosen)
