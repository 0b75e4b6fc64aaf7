"""The compiled step's arithmetic, rounding by rounding, in numpy: what ADR 27, 42, 46 and 68 promise, a second time.

Slow and meant to be read beside the ADR. Every array is float32 and every operation rounds once, in the order written.
bfloat16 values are float32 values that bfloat16 can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from farsight.engine.checkpoint.families.record import Experts
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.quantized import JoinedLinear, QuantizedLinear
from farsight.engine.checkpoint.weights import ExpertWeights, LayerWeights, Linear, Matrix, ModelWeights, Norm
from farsight.engine.models.rotary import rotary_tables
from farsight.engine.native.library import load_library

F32 = np.float32
_FLAGS = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())

FUSED = "avx512f" in _FLAGS or {"avx2", "fma"} <= _FLAGS
"""Whether the processor rounds a multiply-add once; if not, the compiled step rounds the product as well."""

WIDTH = 16 if "avx512f" in _FLAGS else 8 if "avx2" in _FLAGS else 4
"""Lanes of a vector, ``kWidth`` in ``lanes.h``."""


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, *, fused: bool = FUSED) -> np.ndarray:
    """``a * b + c`` rounded once: float64 holds the product, and a sum rounded to odd can be rounded again."""
    if not fused:
        return np.asarray(a * b + c)
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    total = np.asarray(product + addend)
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = np.asarray(total).view(np.int64) & 1 == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.astype(F32)


CENTERS = {8: 0, 4: 8}
"""What stands for 0 where there are no minima."""


def round_rows(x: np.ndarray, group: int, most: int = 127) -> tuple[np.ndarray, np.ndarray]:
    """Floats ``[m, k]`` as integers up to ``most``, ``[m, k / group, group]``, and scales ``[m, k / group]``."""
    groups = x.reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1)
    lost, nothing = ~np.isfinite(largest), largest < F32(1e-30)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.where(lost | nothing, F32(0), F32(most) / largest)
        integers = np.rint(np.where(lost[..., None], F32(0), groups * factor[..., None])).astype(np.int64)
        scales = np.where(lost, F32(np.nan), np.where(nothing, F32(0), largest / F32(most)))
    return integers, scales


def quantized_product(x: np.ndarray, weights: QuantizedLinear, *, fused: bool = FUSED) -> np.ndarray:
    """The product without the bias, float32 ``[m, n]``."""
    integers, scales = round_rows(x, weights.group)
    q = weights.integers().numpy().astype(np.int64).reshape(weights.outputs, -1, weights.group)
    if weights.minima is None:
        q = q - CENTERS[weights.bits]
    out = np.zeros((len(x), weights.outputs), F32)
    for g in range(q.shape[1]):
        exact = integers[:, g] @ q[:, g].T
        assert np.abs(exact).max(initial=0) < 2**31
        out = fma(exact.astype(F32) * scales[:, g, None], weights.scales.numpy()[None, :, g], out, fused=fused)
        if weights.minima is not None:
            shift = -(scales[:, g] * integers[:, g].sum(-1).astype(F32))
            out = fma(shift[:, None], weights.minima.numpy()[None, :, g], out, fused=fused)
    return out


def exact_product(x: np.ndarray, weights: QuantizedLinear | JoinedLinear, *, fused: bool = FUSED) -> np.ndarray:
    """``x @ w.T + bias``, of all parts."""
    parts = weights.parts if isinstance(weights, JoinedLinear) else (weights,)
    out = np.concatenate([quantized_product(x, part, fused=fused) for part in parts], -1)
    return out if weights.bias is None else out + weights.bias.float().numpy()


CHUNK = 128
"""Tokens between two corrections of the softmax."""


def sum_lanes(values: np.ndarray) -> np.ndarray:
    """Sum of ``[..., WIDTH]`` by halves."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def by_vector(values: np.ndarray) -> np.ndarray:
    """``[..., n]`` -> ``[n / WIDTH rounded up, ..., WIDTH]``, filled up with 0."""
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % WIDTH)]
    padded = np.pad(values, padding)
    return np.moveaxis(padded.reshape(*values.shape[:-1], -1, WIDTH), -2, 0)


def add_vectors(values: np.ndarray) -> np.ndarray:
    """The last dimension in lanes, ``[..., WIDTH]``: value ``i`` is added up in lane ``i % WIDTH``."""
    lanes = np.zeros((*values.shape[:-1], WIDTH), F32)
    for vector in by_vector(values):
        lanes = lanes + vector
    return lanes


def exp(x: np.ndarray) -> np.ndarray:
    """The polynomial of ``lanes.h``."""
    scaled = np.clip(x, F32(-87), F32(88)) * F32(1.44269504088896341)
    whole = (scaled + F32(12582912)) - F32(12582912)
    rest = scaled - whole
    result = np.full_like(rest, 1.535336188319500e-4)
    for coefficient in (
        *(1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2),
        *(2.402264791363012e-1, 6.931472028550421e-1, 1.0),
    ):
        result = fma(result, rest, np.full_like(rest, coefficient))
    scaled_up = (result.view(np.int32) + (whole.astype(np.int32) << 23)).view(F32)
    return np.where(x < -87, F32(0), scaled_up)


def mean_square(x: np.ndarray) -> np.ndarray:
    """The sum over the last dimension; value ``i`` is added up in lane ``i % WIDTH``."""
    lanes = np.zeros((*x.shape[:-1], WIDTH), F32)
    for vector in by_vector(x):
        lanes = fma(vector, vector, lanes)
    return sum_lanes(lanes) / F32(x.shape[-1])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    factor = F32(1) / np.sqrt(mean_square(x) + F32(eps))
    return x * factor[..., None] * weight


def layer_norm(x: np.ndarray, norm: Norm, eps: float) -> np.ndarray:
    centered = x - (sum_lanes(add_vectors(x)) / F32(x.shape[-1]))[..., None]
    factor = F32(1) / np.sqrt(mean_square(centered) + F32(eps))
    scaled = centered * factor[..., None] * _floats(norm.weight)
    return scaled if norm.bias is None else scaled + _floats(norm.bias)


class ExactStep:
    """A model whose rows are computed one way; ``dtype`` is that of the weights.

    Args:
        int8_kv: Keys and values are kept in 8 bits (ADR 46).
    """

    def __init__(self, config: DecoderConfig, weights: ModelWeights, max_len: int, *, int8_kv: bool = False) -> None:
        self._mixed = self._mix_integers if int8_kv else self._mix
        self._config = config
        self._weights = weights
        self._dtype = weights.embedding.dtype
        self._tables = None
        if config.rotary is not None:
            half = config.rotary.rotary_dim // 2
            cos, sin = rotary_tables(config.rotary, max_len, torch.float32)
            self._tables = cos[:, None, :half].numpy(), sin[:, None, :half].numpy()

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """The logits of every position of a sequence, ``[tokens, vocab]``."""
        weights, config = self._weights, self._config
        hidden = _floats(weights.embedding[token_ids])
        if weights.positions is not None:
            hidden = hidden + _floats(weights.positions[: len(token_ids)])
        for layer, window in zip(weights.layers, config.sliding_windows, strict=True):
            attended = self._attend(layer, self._norm(hidden, layer.input_norm), window)
            hidden = hidden + self._linear(attended, layer.out)
            hidden = hidden + self._rest(layer, self._norm(hidden, layer.post_norm))
        head = weights.lm_head if isinstance(weights.lm_head, QuantizedLinear) else Linear(weights.lm_head, None)
        return self._linear(self._norm(hidden, weights.norm), head)

    def _rest(self, layer: LayerWeights, normed: np.ndarray) -> np.ndarray:
        """What the MLP or the experts add."""
        whole = None if layer.up is None or layer.down is None else self._mlp(normed, layer.up, layer.down)
        if layer.experts is None or self._config.experts is None:
            assert whole is not None, "a layer has an MLP or experts"
            return whole
        return exact_mixture(self._config.experts, layer.experts, normed, whole, self._linear, self._mlp)

    def _mlp(self, rows: np.ndarray, up: Matrix, down: Matrix) -> np.ndarray:
        return self._linear(self._activate(self._linear(rows, up)), down)

    def _norm(self, x: np.ndarray, norm: Norm | None) -> np.ndarray:
        if norm is None:
            return x
        eps = self._config.norm_eps
        layer = self._config.norm == "layer"
        return layer_norm(x, norm, eps) if layer else rms_norm(x, _floats(norm.weight), eps)

    def _linear(self, rows: np.ndarray, linear: Matrix) -> np.ndarray:
        """Rows of float32; each format rounds them in its own way."""
        if not isinstance(linear, Linear):
            return exact_product(rows, linear)
        narrow, weight = self._narrow(rows)[:, None], _floats(linear.weight)[None]
        tiled = self._dtype == torch.bfloat16 and load_library().fs_has_tiles()
        out = tiled_sums(narrow, weight) if tiled else self._chain(narrow, weight)
        return out if linear.bias is None else out + _floats(linear.bias)

    def _activate(self, up: np.ndarray) -> np.ndarray:
        if self._config.activation == "relu":
            return np.maximum(up, F32(0))
        assert self._config.activation == "silu", "erf is the C library's"
        gate, rest = np.split(up, 2, -1)
        return gate / (F32(1) + exp(-gate)) * rest

    def _attend(self, layer: LayerWeights, normed: np.ndarray, window: int | None) -> np.ndarray:
        config = self._config
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        qkv = self._linear(normed, layer.qkv).reshape(len(normed), -1, head_dim)
        query, key, value = np.split(qkv, [heads, heads + kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(query, _floats(layer.q_norm), config.norm_eps)
            key = rms_norm(key, _floats(layer.k_norm), config.norm_eps)
        query, key = self._turn(query), self._turn(key)
        key, value = (np.repeat(each, heads // kv_heads, 1) for each in (key, value))
        return self._mixed(query, key, value, window).reshape(len(normed), -1)

    def _turn(self, x: np.ndarray) -> np.ndarray:
        if self._tables is None:
            return x
        cos, sin = (table[: len(x)] for table in self._tables)
        half = cos.shape[-1]
        a, b = x[..., :half], x[..., half : 2 * half]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)

    def _mix(self, query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int | None) -> np.ndarray:
        """Causal attention; all ``[tokens, heads, head_dim]``."""
        query, key, value = self._narrow(query), self._narrow(key), self._narrow(value)

        def products(chunk: slice) -> np.ndarray:
            return self._chain(query[:, :, None], key[chunk].transpose(1, 0, 2)[None])

        def add(weights: np.ndarray, chunk: slice, result: np.ndarray) -> np.ndarray:
            return self._chain(self._narrow(weights)[:, :, None], value[chunk].transpose(1, 2, 0)[None], result)

        return mix_in_chunks(query.shape, window, products, add)

    def _mix_integers(self, query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int | None) -> np.ndarray:
        """The same with keys and values in 8 bits."""
        roundings = ((query, 32767), (key, 127), (value, 127))
        (query, of_query), (key, of_key), (value, of_value) = (round_heads(x, most) for x, most in roundings)

        def products(chunk: slice) -> np.ndarray:
            integers = np.einsum("qhd,khd->qhk", query, key[chunk]).astype(F32)
            return integers * of_query[..., None] * of_key[chunk].T[None]

        def add(weights: np.ndarray, chunk: slice, result: np.ndarray) -> np.ndarray:
            rounded, of_weights = round_heads(weights * of_value[chunk].T[None], 32767)
            sums = np.einsum("qhk,khd->qhd", rounded, value[chunk])
            return fma(sums.astype(F32), of_weights[..., None], result)

        return mix_in_chunks(query.shape, window, products, add)

    def _chain(self, a: np.ndarray, b: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        """``start`` + the sum of ``a * b`` over the last dimension, one ``fma`` after the other.

        In bfloat16 neighbours go in pairs, and the second of a pair first.
        """
        shape = np.broadcast_shapes(a.shape, b.shape)
        out = np.zeros(shape[:-1], F32) if start is None else start
        order = list(range(shape[-1]))
        if self._dtype == torch.bfloat16:  # a last one without a neighbour goes by itself
            order = [i ^ 1 if i ^ 1 < shape[-1] else i for i in order]
        for i in order:
            out = fma(a[..., i], b[..., i], out)
        return out

    def _narrow(self, x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x).to(self._dtype).float().numpy()


def tiled_sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of ``a * b`` over the last dimension as ``dense_tiles.h`` has it."""
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1], F32)
    for first in range(0, a.shape[-1], 32):
        chains = [np.zeros_like(out), np.zeros_like(out)]
        for i in range(first, min(first + 32, a.shape[-1])):
            chains[i % 2] = fma(a[..., i], b[..., i], chains[i % 2])
        out = out + (chains[0] + chains[1])
    return out


def mix_in_chunks(
    shape: tuple[int, ...],
    window: int | None,
    products: Callable[[slice], np.ndarray],
    add: Callable[[np.ndarray, slice, np.ndarray], np.ndarray],
) -> np.ndarray:
    """The softmax over ``[tokens, heads, head_dim]``, corrected after each chunk of tokens."""
    num_tokens, heads, head_dim = shape
    end = np.arange(1, num_tokens + 1)[:, None, None]
    begin = np.maximum(0, end - (window or num_tokens))
    highest, total = np.full((num_tokens, heads), -1e30, F32), np.zeros((num_tokens, heads), F32)
    result = np.zeros(shape, F32)
    for first in range(0, num_tokens, CHUNK):
        chunk = slice(first, first + CHUNK)
        token = np.arange(first, min(first + CHUNK, num_tokens))
        seen = (token >= begin) & (token < end)
        scores = np.where(seen, products(chunk) * (F32(1) / np.sqrt(F32(head_dim))), F32(-1e30))
        top = np.maximum(highest, scores.max(-1))
        correction = exp(highest - top)
        weights = np.where(seen, exp(scores - top[..., None]), F32(0))
        highest, total = top, total * correction + sum_lanes(add_vectors(weights))
        result = add(weights, chunk, result * correction[..., None])
    return result * (F32(1) / total)[..., None]


def round_heads(x: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Floats ``[tokens, heads, n]`` as integers of the same shape and scales ``[tokens, heads]``."""
    integers, scales = round_rows(x.reshape(-1, x.shape[-1]), x.shape[-1], most)
    return integers.reshape(x.shape), scales.reshape(x.shape[:-1])


def _floats(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy()


def exact_mixture(
    experts: Experts,
    weights: ExpertWeights,
    normed: np.ndarray,
    shared: np.ndarray | None,
    linear: Callable[[np.ndarray, Matrix], np.ndarray],
    mlp: Callable[[np.ndarray, Matrix, Matrix], np.ndarray],
) -> np.ndarray:
    """What the experts add to the residual stream, ``[T, hidden]`` (ADR 68)."""
    logits = linear(normed, weights.router)
    mixed = np.zeros_like(normed)
    for row, scores in enumerate(logits[:, : experts.count]):
        chosen, factors = _route(experts, scores)
        for expert, factor in zip(chosen, factors, strict=True):
            part = mlp(normed[row : row + 1], weights.up[expert], weights.down[expert])[0]
            mixed[row] = mixed[row] + factor * part
    if shared is None:
        return mixed
    gate = F32(1) / (F32(1) + exp(-logits[:, experts.count :])) if experts.shared_gate else F32(1)
    return mixed + gate * shared


def _route(experts: Experts, scores: np.ndarray) -> tuple[list[int], list[F32]]:
    order = sorted(range(experts.count), key=lambda i: (-scores[i], i))[: experts.active]
    each = exp(scores - scores.max())
    if experts.normalized:
        total = np.zeros((), F32)
        for i in order:
            total = total + each[i]
    else:
        total = sum_lanes(add_vectors(each))
    return order, [each[i] / total * F32(experts.scale) for i in order]
