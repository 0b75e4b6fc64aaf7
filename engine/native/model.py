"""A model whose whole step is one call without the interpreter's lock; see ``step.cpp``."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Mapping
from ctypes import Array, byref, c_char_p, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farsight.core.errors import IntegrityError
from farsight.engine.attention.attention import ScoreShape
from farsight.engine.attention.layout import (
    DecodeInputs,
    check_row_tokens,
    fill_rows,
    find_given_rows,
    find_sample_rows,
)
from farsight.engine.checkpoint.families.mixers import DeltaNet
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.quantized import JoinedLinear, QuantizedLinear
from farsight.engine.checkpoint.rotary_config import RotaryConfig
from farsight.engine.checkpoint.weights import (
    AllInputWeights,
    ExpertWeights,
    LatentWeights,
    LayerWeights,
    Linear,
    Matrix,
    MixerWeights,
    ModelWeights,
    Norm,
)
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.model import embedding_scale, last_hidden
from farsight.engine.models.rotary import rotary_tables
from farsight.engine.native.given_rows import GivenInputs, RowAngles
from farsight.engine.native.library import load_library
from farsight.engine.native.structures import (
    _Config,
    _Experts,
    _Inputs,
    _Latent,
    _Layer,
    _Linear,
    _Mixer,
    _Norm,
    _Quantized,
    _Step,
)
from farsight.engine.sampling.sampler import StepLogits
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import IterationCutOff
from farsight.engine.vision.spans import GivenRows
from farsight.kvcache import StepBatch, StepItem


@dataclass(frozen=True, slots=True)
class NativeStep:
    """One step of ``T`` rows, item by item.

    Attributes:
        rows: int64 ``[3, T]``: token ids, positions, slots of the pool.
        lengths: int32 ``[items, 2]``: tokens computed, and tokens of the sequence with them.
        tables: int32 ``[items, width]``: blocks of the sequence; the rest is arbitrary.
        sample_rows: int64 ``[R]``, ascending.
        given: Rows whose embeddings are not those of their tokens; None without.
        state_rows: int32 ``[items]``: rows of their states; None without states.
        state_keeps: int32 ``[keeps, 3]``, ascending: item, its tokens behind which its state is kept, in which row.
    """

    rows: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray
    sample_rows: np.ndarray
    given: GivenRows | None = None
    state_rows: np.ndarray | None = None
    state_keeps: np.ndarray | None = None


def build_native_step(
    batch: StepBatch,
    order: list[int],
    sequences: Mapping[str, Sequence],
    block_size: int,
    more_rows: list[int] | None = None,
) -> NativeStep:
    """The arrays of a step, its items in ``order`` (from ``order_items``).

    Args:
        more_rows: Further rows whose logits are wanted, beside those that sample.

    Raises:
        IntegrityError: an item asks for tokens or blocks that are not there.
    """
    items = [batch.items[i] for i in order]
    return NativeStep(
        rows=fill_rows(items, sequences, block_size),
        lengths=np.array([(item.num_tokens, item.start + item.num_tokens) for item in items], dtype=np.int32),
        tables=_tables(items),
        sample_rows=np.array(find_sample_rows(items, more_rows), dtype=np.int64),
        given=find_given_rows(items, sequences),
    )


def _tables(items: list[StepItem]) -> np.ndarray:
    tables = np.empty((len(items), max(len(item.blocks) for item in items)), dtype=np.int32)
    for row, item in zip(tables, items, strict=True):
        row[: len(item.blocks)] = item.blocks
    return tables


_DTYPES = (torch.float32, torch.bfloat16)
_MAX_HEAD_DIM = 512
_MAX_TAPS, _MAX_DELTA = 16, 256
_MAX_LATENT = 576
_VECTOR = 16
_PANEL = 64
_LARGEST_GROUP = 65536
"""Products of 255 and 127 that certainly fit 32 bits when they are added up."""
_OUT_OF_MEMORY = 1
_CUT_OFF = 3
_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh")  # in the order of interface.h


def native_problem(config: DecoderConfig, dtype: torch.dtype, block_size: int) -> str | None:
    """Why the compiled step cannot run this model; None if it can."""
    if dtype not in _DTYPES:
        return f"dtype {dtype}: float32 and bfloat16 are compiled"
    most = _MAX_HEAD_DIM if config.latent is None else _MAX_LATENT
    shapes = [config.shape(layer) for layer in range(config.num_hidden_layers)]
    for head_dim in {shape.head_dim for shape in shapes}:
        if head_dim % 2 or head_dim > most:
            return f"head_dim {head_dim}: even numbers up to {most} are compiled"
    for _, mixer in config.mixers:
        if mixer.length > _MAX_TAPS:
            return f"a convolution of {mixer.length} tokens: up to {_MAX_TAPS} are compiled"
        if isinstance(mixer, DeltaNet) and max(mixer.key, mixer.value) > _MAX_DELTA:
            return f"keys of {mixer.key} and values of {mixer.value}: up to {_MAX_DELTA} are compiled"
    if block_size % _VECTOR:
        return f"block_size {block_size}: multiples of {_VECTOR} are compiled"
    experts = config.experts
    inner = [] if experts is None else [experts.inner, experts.shared_inner]
    if any(size % 2 for size in (config.hidden_size, config.intermediate_size, *inner)):
        return "hidden_size, intermediate_size and the sizes of experts must be even"
    return None


def matrix_problem(weights: ModelWeights) -> str | None:
    """Why the compiled step cannot multiply with these matrices; None if it can."""
    for layer in weights.layers:
        for matrix in layer.matrices:
            if isinstance(matrix, JoinedLinear) and any(part.outputs % _PANEL for part in matrix.parts[:-1]):
                return f"quantised parts of other than multiples of {_PANEL} outputs"
            parts = matrix.parts if isinstance(matrix, JoinedLinear) else (matrix,)
            if any(isinstance(part, QuantizedLinear) and part.group > _LARGEST_GROUP for part in parts):
                return f"groups of more than {_LARGEST_GROUP} weights"
    return None


class NativeModel:
    """A model packed for the compiled step. Only one thread at a time may use it.

    The pool's blocks keep their size, but not their inner layout (``kv_plain.h``, ``kv_int8.h``): the pool belongs to
    this model.

    Args:
        weights: The matrices are copied; the caller may drop them.
        max_len: Longest sequence to be run, in tokens.
        num_threads: Threads that compute a step, the caller's included.

    Attributes:
        handle: The model, as the library's functions take it; it lives as long as this object.

    Raises:
        NativeUnavailable: there is no compiler.
        MemoryError: the weights do not fit a second time.
        RuntimeError: the system refuses a thread.
    """

    def __init__(
        self, config: DecoderConfig, weights: ModelWeights, pool: KVPool, max_len: int, num_threads: int
    ) -> None:
        self._library = load_library()
        self._library.fs_failure.restype = c_char_p
        self._vocab_size = config.vocab_size
        self._max_len = max_len
        self._num_positions = max_len + (0 if config.rotary is None else config.rotary.long_row(max_len))
        self._keep: list[Any] = [pool, weights.embedding, weights.positions]
        self._logits = torch.empty(0, config.vocab_size)
        self._best = np.empty(0, dtype=np.int64)
        self.handle = c_void_p()
        self._dtype = weights.embedding.dtype
        self._angles = RowAngles.of(config.rotary, max_len)
        self._tables = {rotary: self._rotary_tables(rotary) for rotary in set(config.layer_rotaries)}
        self._call("fs_create", byref(self._config(config, weights, pool, num_threads)), byref(self.handle))
        weakref.finalize(self, self._library.fs_destroy, self.handle)
        if weights.inputs is not None:
            self._call("fs_set_inputs", self.handle, byref(self._inputs(weights.inputs, config)))
        for index, layer in enumerate(weights.layers):
            packed = self._layer(layer, config, pool, index)
            self._call("fs_add_layer", self.handle, byref(packed))
        lm_head = weights.lm_head
        whole = Linear(lm_head, None) if isinstance(lm_head, Tensor) else lm_head
        head = self._linear(dataclasses.replace(whole, bias=weights.head_bias))
        self._call("fs_set_head", self.handle, byref(self._norm(weights.norm)), byref(head))

    def forward(
        self,
        step: NativeStep,
        hidden: Tensor | None = None,
        cut_off_at_s: float = math.inf,
        middle: Tensor | None = None,
    ) -> tuple[Tensor, np.ndarray]:
        """Runs a step: writes its keys and values into the pool.

        Args:
            hidden: float32 ``[R, hidden]``; gets what the last norm reads of the sampled rows.
            cut_off_at_s: As ``StepBackend.cut_off_at_s``.
            middle: float32 ``[R, hidden]``; gets the sampled rows behind half of the layers.

        Returns:
            Logits of the sampled rows, float32 ``[R, vocab]``, and ``engine.sampling.sampler.likeliest`` of them; the
            next step overwrites both.

        Raises:
            IntegrityError: The model lacks a token or a position: the step would read beyond its tables.
            IterationCutOff: ``cut_off_at_s`` has come.
        """
        self._check(step)
        num_samples = len(step.sample_rows)
        if num_samples > len(self._best):
            size = max(num_samples, 2 * len(self._best))
            self._logits = torch.empty(size, self._vocab_size)
            self._best = np.empty(size, dtype=np.int64)
        token_ids, positions, slot_ids = step.rows
        given = None if step.given is None else GivenInputs.of(step.given, len(token_ids), self._dtype, self._angles)
        arguments = _Step(
            len(token_ids),
            len(step.lengths),
            num_samples,
            *(_address(array) for array in (token_ids, positions, slot_ids, step.lengths, step.tables)),
            step.tables.shape[1],
            *(None if each is None else _address(each) for each in (step.state_rows, step.state_keeps)),
            0 if step.state_keeps is None else len(step.state_keeps),
            _address(step.sample_rows),
            self._logits.data_ptr(),
            _address(self._best),
            *(None if rows is None else rows.data_ptr() for rows in (hidden, middle)),
            *(None,) * 4 if given is None else given.addresses,
            cut_off_at_s,
        )
        self._call("fs_step", self.handle, byref(arguments))
        return self._logits[:num_samples], self._best[:num_samples]

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library that may fail."""
        status = getattr(self._library, name)(*arguments)
        if status == _CUT_OFF:
            raise IterationCutOff
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: out of memory")
        if status:
            raise RuntimeError(f"{name}: {self._library.fs_failure().decode(errors='replace')}")

    def _check(self, step: NativeStep) -> None:
        check_row_tokens(step.rows, self._vocab_size)
        positions = step.rows[1]
        if positions.min() < 0 or positions.max() >= self._num_positions:
            raise IntegrityError(f"positions {positions.min()}..{positions.max()} of {self._num_positions}")

    def _config(self, config: DecoderConfig, weights: ModelWeights, pool: KVPool, num_threads: int) -> _Config:
        blocks, scores, dtype = config.blocks, ScoreShape.of_model(config), weights.embedding.dtype
        return _Config(
            int(dtype == torch.bfloat16),
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.vocab_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            pool.block_size,
            int(config.norm == "layer"),
            _ACTIVATIONS.index(config.activation),
            num_threads,
            int(pool.dtype == torch.int8),
            int(blocks.gated),
            int(blocks.parallel),
            int(blocks.head_norm == "all"),
            0 if config.latent is None else config.latent.rank,
            config.norm_eps,
            embedding_scale(config, dtype),
            blocks.residual_scale,
            blocks.logit_scale,
            scores.scale or 0.0,
            scores.cap or 0.0,
            blocks.logit_cap or 0.0,
            *((0.0, 0.0) if blocks.clamp is None else (blocks.clamp.limit, blocks.clamp.alpha)),
            self._floats(torch.tensor(scores.slopes)) if scores.slopes else None,
            weights.embedding.data_ptr(),
            None if weights.positions is None else weights.positions.data_ptr(),
            self._norm(weights.embedding_norm),
            self._query_scales(config),
            None if pool.states is None else pool.states.rows.data_ptr(),
            config.state_size,
        )

    def _query_scales(self, config: DecoderConfig) -> int | None:
        scale = config.blocks.query_scale
        if scale is None:
            return None
        positions = torch.arange(self._num_positions, dtype=torch.float32)
        return self._floats(1 + scale.beta * torch.log1p(torch.floor(positions / scale.length)))

    def _inputs(self, weights: AllInputWeights, config: DecoderConfig) -> _Inputs:
        self._keep.append(weights.embedding)
        width, dtype = config.blocks.layer_inputs, weights.embedding.dtype
        scale = float(torch.tensor(math.sqrt(width), dtype=dtype))
        projection = self._linear(weights.projection)
        return _Inputs(weights.embedding.data_ptr(), projection, self._floats(weights.norm), width, scale)

    def _rotary_tables(self, rotary: RotaryConfig | None) -> tuple[int | None, int | None, int]:
        """Cosines, sines and how many values of a head they turn."""
        if rotary is None:
            return None, None, 0
        half = rotary.rotary_dim // 2  # both halves of a row are the same
        cos, sin = rotary_tables(rotary, self._max_len, torch.float32)
        return self._floats(cos[:, :half]), self._floats(sin[:, :half]), rotary.rotary_dim

    def _layer(self, layer: LayerWeights, config: DecoderConfig, pool: KVPool, index: int) -> _Layer:
        shape, inputs = config.shape(index), layer.inputs
        norms = (layer.input_norm, layer.post_norm, layer.after_attention, layer.after_mlp)
        return _Layer(
            *(self._norm(norm) for norm in norms),
            self._floats(layer.q_norm),
            self._floats(layer.k_norm),
            *(self._linear(linear) for linear in (layer.qkv, layer.out)),
            *(_Linear() if linear is None else self._linear(linear) for linear in (layer.up, layer.down)),
            *self._tables[config.layer_rotaries[index]],
            config.sliding_windows[index] or 0,
            pool.keys[index].data_ptr(),
            pool.values[index].data_ptr(),
            self._floats(layer.sinks),
            _Experts() if layer.experts is None else self._experts(layer.experts, config),
            _Latent() if layer.latent is None else self._latent(layer.latent),
            _Mixer() if layer.mixer is None else self._mixer(layer.mixer, config, pool, index),
            shape.head_dim,
            shape.kv_heads,
            int(shape.keeps_kv),
            int(config.blocks.attention_gate),
            self._floats(torch.ones(shape.head_dim)) if config.blocks.value_norm else None,
            *((_Linear(),) * 2 if inputs is None else map(self._linear, (inputs.gate, inputs.projection))),
            _Norm() if inputs is None else self._norm(inputs.norm),
            1.0 if layer.scale is None else float(layer.scale),
        )

    def _mixer(self, weights: MixerWeights, config: DecoderConfig, pool: KVPool, index: int) -> _Mixer:
        mixer, states = config.shape(index).mixer, pool.states
        assert mixer is not None and states is not None, "weights are of the configuration"
        kind, delta = 1, (0,) * 5  # as in interface.h
        if isinstance(mixer, DeltaNet):
            kind, delta = 2, (mixer.key_heads, mixer.value_heads, mixer.key, mixer.value, int(mixer.tiled))
        held = (weights.taps, weights.bias, weights.rates, weights.steps, weights.norm)
        sizes = kind, mixer.length, mixer.convolved, mixer.mixed
        return _Mixer(*sizes, *delta, *map(self._floats, held), states.first_value(index))

    def _latent(self, weights: LatentWeights) -> _Latent:
        q_up = _Linear() if weights.q_up is None else self._linear(weights.q_up)
        _, plain, rank = weights.keys.shape
        _, value, _ = weights.values.shape
        keys = _Linear(weights.keys.data_ptr(), None, rank, plain, None, 0)
        values = _Linear(weights.values.data_ptr(), None, value, rank, None, 0)
        norms = self._floats(weights.q_norm), self._floats(weights.kv_norm)
        return _Latent(*norms, q_up, keys, values, weights.keys.stride(0))

    def _experts(self, weights: ExpertWeights, config: DecoderConfig) -> _Experts:
        experts = config.experts
        assert experts is not None, "weights are of the configuration"
        up, down = ((_Linear * experts.count)(*map(self._linear, each)) for each in (weights.up, weights.down))
        flags = (experts.normalized, experts.shared_gate, experts.scores == "sigmoid")
        groups = experts.groups, experts.active_groups, experts.group_best
        correction = self._floats(weights.correction)
        router, beside = self._linear(weights.router), weights.beside
        found = _Experts(
            experts.count, experts.active, *map(int, flags), *groups, experts.scale, correction, router, up, down
        )
        if beside is not None:
            found.router_norm, found.scales = self._floats(beside.router), self._floats(beside.scales)
            norms = (beside.before, beside.after_mlp, beside.after)
            found.before, found.after_mlp, found.after = map(self._norm, norms)
        return found

    def _norm(self, norm: Norm | None) -> _Norm:
        return _Norm(None, None) if norm is None else _Norm(self._floats(norm.weight), self._floats(norm.bias))

    def _linear(self, linear: Matrix) -> _Linear:
        """Arguments whose tensors ``linear`` owns: valid as long as it is."""
        bias = self._floats(linear.bias)
        if isinstance(linear, Linear):
            n, k = linear.weight.shape
            return _Linear(linear.weight.data_ptr(), bias, n, k, None, 0)
        parts = quantized_arguments(linear)
        return _Linear(None, bias, linear.outputs, parts[0].k, parts, len(parts))

    def _floats(self, values: Tensor | None) -> int | None:
        """The address of float32 values that live as long as the model."""
        if values is None:
            return None
        kept = values.float().contiguous()
        self._keep.append(kept)
        return kept.data_ptr()


def quantized_arguments(linear: QuantizedLinear | JoinedLinear) -> Array[_Quantized]:
    """``FsQuantized`` of each part; its tensors are the parts'."""
    parts = linear.parts if isinstance(linear, JoinedLinear) else (linear,)
    return (_Quantized * len(parts))(*map(_quantized, parts))


def _quantized(part: QuantizedLinear) -> _Quantized:
    minima = None if part.minima is None else part.minima.data_ptr()
    sizes = part.outputs, part.inputs, part.bits, part.group
    return _Quantized(part.values.data_ptr(), part.scales.data_ptr(), minima, *sizes)


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


class NativeBackend:
    """One compiled call, without the interpreter's lock, on threads of its own.

    Torch gets one thread: its pool would spin on the cores of those threads after each of its operations.

    Attributes:
        model: It; its threads may do other work between steps.
    """

    def __init__(
        self, config: DecoderConfig, weights: ModelWeights, pool: KVPool, max_len: int, num_threads: int = 1
    ) -> None:
        self.model = NativeModel(config, weights, pool, max_len, num_threads)
        self.cut_off_at_s = math.inf
        self.keeps_middle = False
        self._block_size = pool.block_size
        self._config = config
        self._last_norm = weights.norm
        self._states = pool.states
        torch.set_num_threads(1)

    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
        *,
        with_hidden: bool = False,
    ) -> StepLogits:
        """See ``engine.steps.backends.StepBackend.run``."""
        step = build_native_step(batch, order, sequences, self._block_size, more_rows)
        shape = len(step.sample_rows), self._config.hidden_size
        hidden = torch.empty(shape) if with_hidden else None
        middle = torch.empty(shape) if self.keeps_middle else None
        logits, best = self._forward(step, [batch.items[i] for i in order], sequences, hidden, middle)
        if hidden is not None:
            hidden = last_hidden(hidden, self._config, self._last_norm)
        return StepLogits(logits, best.tolist(), hidden, middle)

    def run_ready(self, inputs: DecodeInputs) -> StepLogits:
        """See ``engine.steps.backends.ReadyBackend.run_ready``."""
        sample_rows = np.arange(len(inputs.items), dtype=np.int64)
        self.cut_off_at_s = math.inf
        logits, best = self._forward(
            NativeStep(inputs.rows, inputs.lengths, inputs.tables, sample_rows), inputs.items, {}
        )
        return StepLogits(logits, best.tolist())

    def _forward(
        self,
        step: NativeStep,
        items: list[StepItem],
        sequences: Mapping[str, Sequence],
        hidden: Tensor | None = None,
        middle: Tensor | None = None,
    ) -> tuple[Tensor, np.ndarray]:
        if self._states is None:
            return self.model.forward(step, hidden, self.cut_off_at_s, middle)
        with self._states.step(items, sequences, may_be_cut_off=self.cut_off_at_s < math.inf) as rows:
            keeps = np.array(self._states.keeps_of(items), dtype=np.int32)
            step = dataclasses.replace(step, state_rows=np.array(rows, dtype=np.int32), state_keeps=keeps)
            return self.model.forward(step, hidden, self.cut_off_at_s, middle)
