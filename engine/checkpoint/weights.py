"""A safetensors checkpoint, read into the fused tensors that the forward pass multiplies with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from farsight.engine.checkpoint.config_fields import CheckpointError as CheckpointError
from farsight.engine.checkpoint.families.mixers import DeltaNet, Mixer
from farsight.engine.checkpoint.families.record import Experts, Latent, LayerShape
from farsight.engine.checkpoint.layers import AllInputWeights as AllInputWeights
from farsight.engine.checkpoint.layers import BesideWeights as BesideWeights
from farsight.engine.checkpoint.layers import ExpertWeights as ExpertWeights
from farsight.engine.checkpoint.layers import InputWeights as InputWeights
from farsight.engine.checkpoint.layers import LatentWeights as LatentWeights
from farsight.engine.checkpoint.layers import LayerWeights as LayerWeights
from farsight.engine.checkpoint.layers import Linear as Linear
from farsight.engine.checkpoint.layers import Matrix as Matrix
from farsight.engine.checkpoint.layers import MixerWeights as MixerWeights
from farsight.engine.checkpoint.layers import ModelWeights as ModelWeights
from farsight.engine.checkpoint.layers import Norm as Norm
from farsight.engine.checkpoint.layers import delta_order, gated_order, latent_orders, qkv_order, turned_order
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.names import head_norm_sizes, latent_sizes, mixer_parts, qkv_parts
from farsight.engine.checkpoint.quantized import QuantizedLinear, join_records
from farsight.engine.checkpoint.repacking import record_rows
from farsight.engine.checkpoint.sources import TensorSource, fill_rows, open_checkpoint, threads_for

Progress = Callable[[float], object]
"""Takes a share, from 0 to 1."""


def load_weights(
    model_dir: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    keep_quantized: bool = True,
    progress: Progress | None = None,
) -> ModelWeights:
    """Reads a checkpoint onto the device.

    Args:
        model_dir: A directory with ``model.safetensors`` or the shards of its index, or a GGUF file.
        keep_quantized: Whether matrices that are quantised in the checkpoint stay so, where there is a record of their
            format; otherwise they become floats. On a GPU they always do.
        progress: Is told the share of the parameters that has been read.

    Raises:
        CheckpointError: no such files, an unreadable file, or a missing, unexpected or odd tensor; names it.
        InvalidValueError: a file that leads out of the directory, or a damaged GGUF file.
    """
    source = open_checkpoint(model_dir, config, device)
    keeps = keep_quantized and device == "cpu"
    read = _Read(source, progress)
    allocation = Allocation(config, dtype, device, record=read.record if keeps else None)
    weights = allocation.model()
    for name in source.names():
        if name in allocation.targets:  # the others are kept as records
            target = allocation.targets[name]
            with threads_for(target.numel()):
                source.fill(name, target)
        read.add(name)
    allocation.finish()
    return weights


class _Read:
    """Tells how much of a checkpoint has been read; a tensor that is read twice counts once."""

    def __init__(self, source: TensorSource, progress: Progress | None) -> None:
        self._source = source
        self._progress = progress
        self._left = {name: source.num_values(name) for name in source.names()}
        self._total = self._num_left = sum(self._left.values())

    def record(self, name: str) -> QuantizedLinear | None:
        """As ``TensorSource.record``."""
        found = self._source.record(name)
        if found is not None:
            self.add(name)
        return found

    def add(self, name: str) -> None:
        self._num_left -= self._left.pop(name, 0)
        if self._progress is not None:
            self._progress(1.0 - self._num_left / self._total)


def allocate_weights(
    config: DecoderConfig, dtype: torch.dtype, device: str = "cpu"
) -> tuple[ModelWeights, dict[str, Tensor]]:
    """Weights that hold anything, and by the checkpoint's names the places in them where its tensors go."""
    allocation = Allocation(config, dtype, device)
    return allocation.model(), allocation.targets


class Allocation:
    """Makes the tensors of a model, or of some of its layers.

    Args:
        config: Its layers and their sizes are those to be made.
        first_layer: Number of the first of them in the checkpoint.
        record: Gives a matrix of the checkpoint as it is quantised, or None; without it no matrix is.
        experts: Numbers of the experts to be made; None for all.

    Attributes:
        targets: Where each tensor of the checkpoint goes: views into the fused tensors, by the checkpoint's names.
            Matrices that are kept quantised are not among them.
        names: The checkpoint's names of its tensors.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: str,
        first_layer: int = 0,
        record: Callable[[str], QuantizedLinear | None] | None = None,
        experts: range | None = None,
    ) -> None:
        self._own_experts = experts
        self.targets: dict[str, Tensor] = {}
        self.names = config.names
        self._finish: list[Callable[[], object]] = []
        self._config = config
        self._dtype = dtype
        self._device = device
        self._first_layer = first_layer
        self._record = record

    def model(self) -> ModelWeights:
        """All of it."""
        embedding, names = self.embedding(), self.names
        head = self._lm_head(embedding)
        bias = self.tensor(f"{names.lm_head}.bias", len(embedding)) if self._config.biases.head else None
        return ModelWeights(
            embedding,
            self.positions(),
            self.layers(),
            self.final_norm(),
            head,
            bias,
            self.embedding_norm(),
            self._all_inputs() if self._config.blocks.layer_inputs else None,
        )

    def _all_inputs(self) -> AllInputWeights:
        width, layers, hidden = (
            self._config.blocks.layer_inputs,
            self._config.num_hidden_layers,
            self._config.hidden_size,
        )
        embedding, projection, norm = self.names.all_inputs
        table = self.tensor(f"{embedding}.weight", self._config.vocab_size, layers * width)
        matrix = self._linear("", [projection], [layers * width], hidden, bias=False)
        return AllInputWeights(table, matrix, self._norm_weight(norm, width))

    def finish(self) -> None:
        """Brings what was read into the form that is computed with."""
        for change in self._finish:
            change()
        self._finish.clear()

    def _lm_head(self, embedding: Tensor) -> Tensor | QuantizedLinear:
        tied = self._config.tie_word_embeddings
        name = f"{self.names.embedding if tied else self.names.lm_head}.weight"
        kept = None if self._config.blocks.unit_head else self._kept([name])
        if kept is not None:
            record = kept[0]
            if tied:  # floats and record are of one tensor, which is unpacked once
                self._finish.append(lambda: fill_rows(embedding, record_rows(record, embedding.dtype)))
                del self.targets[name]
            return record
        if not self._config.blocks.unit_head:
            return embedding if tied else self.tensor(name, *embedding.shape)
        head = self._empty(*embedding.shape) if tied else self.tensor(name, *embedding.shape)
        self._finish.append(lambda: head.copy_(F.normalize((embedding if tied else head).float(), dim=-1)))
        return head

    def embedding(self) -> Tensor:
        return self.tensor(f"{self.names.embedding}.weight", self._config.vocab_size, self._config.hidden_size)

    def embedding_norm(self) -> Norm | None:
        return self._norm(self.names.embedding_norm) if self.names.embedding_norm else None

    def positions(self) -> Tensor | None:
        names = self.names
        if not names.positions:
            return None
        rows = self._config.max_position_embeddings + names.unused_positions
        return self.tensor(f"{names.positions}.weight", rows, self._config.hidden_size)[names.unused_positions :]

    def layers(self) -> tuple[LayerWeights, ...]:
        first = self._first_layer
        layers = range(self._config.num_hidden_layers)
        return tuple(
            self._layer(self.names.layer(first + i), self._config.shape(i), self._config.mixture(i)) for i in layers
        )

    def final_norm(self) -> Norm | None:
        return self._norm(self.names.norm) if self.names.norm else None

    def _layer(self, prefix: str, shape: LayerShape, experts: Experts | None) -> LayerWeights:
        config, names, biases, blocks = self._config, self.names, self._config.biases, self._config.blocks
        hidden, mixer = config.hidden_size, shape.mixer
        before = self._norm(prefix + names.input_norm) if blocks.norm_before else None
        own = blocks.norm_before and not blocks.one_norm
        up, down = self._mlp(prefix, shape.inner, experts)
        q_norm = k_norm = None
        if mixer is None:
            q_norm, k_norm = self._head_norms(prefix, shape)
            attended = config.num_attention_heads * shape.head_dim if config.latent is None else config.attended_size
            qkv, out = self._qkv(prefix, shape), self._linear(prefix, [names.out], [hidden], attended, bias=biases.out)
        else:
            qkv, out = self._mixer_ends(prefix, mixer)
        return LayerWeights(
            input_norm=before,
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            out=out,
            post_norm=self._norm(prefix + names.post_norm) if own else before,
            up=up,
            down=down,
            after_attention=self._norm(prefix + names.after_attention) if blocks.norm_after else None,
            after_mlp=self._norm(prefix + names.after_mlp) if blocks.norm_after else None,
            experts=None if experts is None else self._experts(prefix, experts),
            sinks=self.tensor(prefix + names.sinks, config.num_attention_heads) if blocks.sinks else None,
            latent=None if config.latent is None else self._latent(prefix, config.latent),
            mixer=None if mixer is None else self._mixer(prefix, mixer),
            inputs=self._inputs(prefix, blocks.layer_inputs) if blocks.layer_inputs else None,
            scale=self.tensor(prefix + names.layer_scale, 1) if blocks.layer_scale else None,
        )

    def _inputs(self, prefix: str, width: int) -> InputWeights:
        gate, projection, norm = self.names.inputs
        hidden = self._config.hidden_size
        return InputWeights(
            self._linear(prefix, [gate], [width], hidden, bias=False),
            self._linear(prefix, [projection], [hidden], width, bias=False),
            self._norm(prefix + norm),
        )

    def _mixer_ends(self, prefix: str, mixer: Mixer) -> tuple[Matrix, Matrix]:
        """The first and the last matrix of a layer with a state."""
        names, hidden, bias = self.names, self._config.hidden_size, not isinstance(mixer, DeltaNet) and mixer.bias
        parts, sizes = mixer_parts(self._config, mixer)
        order = delta_order(mixer) if names.mixer_grouped and isinstance(mixer, DeltaNet) else None
        first = self._linear(prefix, parts, sizes, hidden, bias=bias, order=order)
        return first, self._linear(prefix, [names.of_mixer(names.mixer_out)], [hidden], mixer.mixed, bias=bias)

    def _mixer(self, prefix: str, mixer: Mixer) -> MixerWeights:
        names, channels = self.names, mixer.convolved
        conv = prefix + names.of_mixer(names.mixer_conv)
        stored, taps = self._exact(f"{conv}.weight", channels, 1, mixer.length), torch.empty(mixer.length, channels)
        self._finish.append(lambda: taps.copy_(stored[:, 0].t()))
        if not isinstance(mixer, DeltaNet):
            return MixerWeights(taps, self._exact(f"{conv}.bias", channels) if mixer.bias else None)
        rates = self._exact(prefix + names.of_mixer(names.rates), mixer.value_heads)
        if not names.rates_ready:
            self._finish.append(lambda: rates.exp_().neg_())
        steps = self._exact(prefix + names.of_mixer(names.steps), mixer.value_heads)
        norm = self._exact(prefix + names.of_mixer(names.mixer_norm), mixer.value)
        return MixerWeights(taps, None, rates, steps, norm)

    def _exact(self, name: str, *shape: int) -> Tensor:
        """A tensor that is computed with in float32, whatever the model's type is."""
        self.targets[name] = torch.empty(shape, dtype=torch.float32, device=self._device)
        return self.targets[name]

    def _qkv(self, prefix: str, shape: LayerShape) -> Matrix:
        config, names, latent = self._config, self.names, self._config.latent
        if latent is None:
            order = None if names.in_order else qkv_order(config)
            if config.blocks.attention_gate:
                order = gated_order(config.num_attention_heads, shape)
            parts, sizes = qkv_parts(config, shape)
            if shape.one_key:
                parts, sizes, order = (*parts, parts[1]), [*sizes, sizes[1]], None
            made = self._linear(prefix, parts, sizes, config.hidden_size, bias=config.biases.qkv, order=order)
            if shape.one_key and isinstance(
                made, Linear
            ):  # the last rows have been read; those of the keys are the same
                _, keys, values = torch.split(made.weight, sizes)
                self._finish.append(lambda: keys.copy_(values))
            return made
        sizes = latent_sizes(config, latent)
        query_order, row_order = latent_orders(latent, config.num_attention_heads)
        first = query_order if latent.q_rank is None else torch.arange(latent.q_rank)
        order = torch.cat([first, sizes[0] + row_order])
        return self._linear(prefix, names.qkv, sizes, config.hidden_size, bias=False, order=order)

    def _latent(self, prefix: str, latent: Latent) -> LatentWeights:
        names, heads, q_norm, q_up = self.names, self._config.num_attention_heads, None, None
        if latent.q_rank is not None:
            order, _ = latent_orders(latent, heads)
            q_norm = self._norm_weight(prefix + names.q_norm, latent.q_rank)
            q_up = self._linear(prefix, [names.q_up], [heads * latent.query], latent.q_rank, bias=False, order=order)
        up = self.tensor(f"{prefix}{names.kv_up}.weight", heads * (latent.plain + latent.value), latent.rank)
        keys, values = torch.split(up.view(heads, -1, latent.rank), [latent.plain, latent.value], 1)
        return LatentWeights(q_norm, q_up, self._norm_weight(prefix + names.k_norm, latent.rank), keys, values)

    def _head_norms(self, prefix: str, shape: LayerShape) -> tuple[Tensor | None, Tensor | None]:
        config, names = self._config, self.names
        if config.blocks.head_norm is None:
            return None, None
        q_size, k_size = head_norm_sizes(config, shape)
        q_norm = self._norm_weight(f"{prefix}{names.q_norm}", q_size)
        if shape.kv_of is not None:
            return q_norm, None
        k_norm = self._norm_weight(f"{prefix}{names.k_norm}", k_size)
        if names.interleaved:
            for weight in (q_norm, k_norm):
                self._reorder(weight, turned_order(config, len(weight) // config.head_dim))
        return q_norm, k_norm

    def _mlp(self, prefix: str, inner: int, experts: Experts | None) -> tuple[Matrix | None, Matrix | None]:
        """The MLP that every token takes."""
        names = self.names
        if experts is None or experts.beside:
            return self._gated(prefix, names.up, names.down, inner)
        if not experts.shared_inner:
            return None, None
        return self._gated(prefix, names.shared_up, names.shared_down, experts.shared_inner)

    def _gated(self, prefix: str, up: Sequence[str], down: str, inner: int) -> tuple[Matrix, Matrix]:
        bias, hidden = self._config.biases.mlp, self._config.hidden_size
        return (
            self._linear(prefix, up, self._up_sizes(inner), hidden, bias=bias),
            self._linear(prefix, [down], [hidden], inner, bias=bias),
        )

    def _experts(self, prefix: str, experts: Experts) -> ExpertWeights:
        names, hidden = self.names, self._config.hidden_size
        weight = self._empty(experts.router_rows, hidden)
        self.targets[f"{prefix}{names.router}.weight"] = weight[: experts.count]
        if experts.shared_gate:
            self.targets[f"{prefix}{names.shared_gate}.weight"] = weight[experts.count :]
        bias = self.tensor(f"{prefix}{names.router}.bias", experts.count) if experts.router_bias else None
        router = Linear(weight, bias)
        correction = None
        if experts.correction:
            correction = torch.empty(experts.count, dtype=torch.float32, device=self._device)
            self.targets[prefix + names.correction] = correction[None] if names.correction_rows else correction
        own = range(experts.count) if self._own_experts is None else self._own_experts
        beside = self._beside(prefix, experts) if experts.beside else None
        if "{}" not in names.expert_down:
            return ExpertWeights(router, *self._stacked(prefix, experts, len(own)), correction, own.start, beside)
        pairs = [
            self._gated(
                prefix, [name.format(i) for name in names.expert_up], names.expert_down.format(i), experts.inner
            )
            for i in own
        ]
        up, down = tuple(up for up, _ in pairs), tuple(down for _, down in pairs)
        return ExpertWeights(router, up, down, correction, own.start, beside)

    def _beside(self, prefix: str, experts: Experts) -> BesideWeights:
        of_router, of_experts, *norms = (prefix + name for name in self.names.beside)
        router = self._exact(of_router, self._config.hidden_size)
        self._finish.append(lambda: router.mul_(self._config.hidden_size**-0.5))
        return BesideWeights(router, self._exact(of_experts, experts.count), *map(self._norm, norms))

    def _stacked(self, prefix: str, experts: Experts, count: int) -> tuple[tuple[Matrix, ...], tuple[Matrix, ...]]:
        """Experts that lie in one tensor each for all first and all second products."""
        names, hidden = self.names, self._config.hidden_size
        outputs = sum(self._up_sizes(experts.inner))
        order = torch.arange(outputs).view(-1, 2).t().flatten() if names.expert_pairs else None
        first = [prefix + name for name in names.expert_up]
        up = self._stack(first, (count, outputs, hidden), order)
        return up, self._stack([prefix + names.expert_down], (count, hidden, experts.inner), None)

    def _stack(self, names: Sequence[str], shape: tuple[int, int, int], order: Tensor | None) -> tuple[Matrix, ...]:
        """The matrices of all experts, each ``[outputs, inputs]``, out of one tensor or of equal parts.

        Args:
            order: As of ``_linear``.
        """
        count, outputs, _ = shape
        weight_end, bias_end = self.names.expert_ends
        biases: Sequence[Tensor | None] = [None] * count
        if self._config.biases.mlp:
            held = self._empty(count, outputs)
            self._register_parts(names, bias_end, held)
            biases = list(held)
            self._reorder(held, order, dim=1)
        kept = self._kept([name + weight_end for name in names])
        if kept is not None:
            experts = zip(*(each.split(count, order) for each in kept), strict=True)
            return tuple(join_records(parts, bias) for parts, bias in zip(experts, biases, strict=True))
        weight = self._empty(*shape)
        self._register_parts(names, weight_end, weight)
        for each in weight if order is not None else ():
            self._reorder(each, order)
        return tuple(map(Linear, weight, biases))

    def _register_parts(self, names: Sequence[str], end: str, whole: Tensor) -> None:
        """The tensors of all experts, ``[experts, outputs]`` or ``[experts, outputs, inputs]``, cut by outputs."""
        turned = whole.dim() == 3 and self.names.expert_transposed
        parts = torch.split(whole, whole.shape[1] // len(names), 1)
        self.targets.update(
            (name + end, part.transpose(1, 2) if turned else part) for name, part in zip(names, parts, strict=True)
        )

    def _up_sizes(self, inner: int) -> list[int]:
        return [inner] * (self._config.up_size // self._config.intermediate_size)

    def _linear(
        self,
        prefix: str,
        names: Sequence[str],
        sizes: list[int],
        inputs: int,
        *,
        bias: bool,
        order: Tensor | None = None,
    ) -> Matrix:
        """A layer of ``sum(sizes)`` outputs; the checkpoint holds them in so many tensors or in a single one.

        Args:
            order: Which stored output each output is; None where they lie in order.
        """
        sizes = sizes if len(names) > 1 else [sum(sizes)]
        biases = self._empty(sum(sizes)) if bias else None
        if biases is not None:
            self._register(prefix, names, "bias", torch.split(biases, sizes))
            self._reorder(biases, order)
        in_order = order is None and not self.names.transposed
        kept = self._kept([f"{prefix}{name}.weight" for name in names]) if in_order else None
        if kept is not None:
            return join_records(kept, biases)
        weight = self._empty(sum(sizes), inputs)
        parts = torch.split(weight, sizes)
        self._register(prefix, names, "weight", [part.t() for part in parts] if self.names.transposed else parts)
        self._reorder(weight, order)
        return Linear(weight, biases)

    def _reorder(self, values: Tensor, order: Tensor | None, dim: int = 0) -> None:
        if order is not None:
            self._finish.append(lambda: values.copy_(values.index_select(dim, order.to(values.device))))

    def _kept(self, names: Sequence[str]) -> list[QuantizedLinear] | None:
        """The records of matrices that are multiplied together; None unless each has one."""
        if self._record is None:
            return None
        found = []
        for name in names:
            record = self._record(name)
            if record is None:
                return None
            found.append(record)
        return found

    def _register(self, prefix: str, names: Sequence[str], kind: str, parts: Sequence[Tensor]) -> None:
        self.targets.update({f"{prefix}{name}.{kind}": part for name, part in zip(names, parts, strict=True)})

    def _norm(self, name: str) -> Norm:
        has_bias = self._config.norm == "layer" and self._config.blocks.norm_bias
        bias = self.tensor(f"{name}.bias", self._config.hidden_size) if has_bias else None
        return Norm(self._norm_weight(name, self._config.hidden_size), bias)

    def _norm_weight(self, name: str, size: int) -> Tensor:
        """A weight that something is added to is kept in float32: the sum has more digits than the stored one."""
        offset = self._config.blocks.norm_offset
        if offset is None:
            return self.tensor(f"{name}.weight", size)
        weight = torch.empty(size, dtype=torch.float32, device=self._device)
        self.targets[f"{name}.weight"] = weight
        self._finish.append(partial(weight.add_, offset))
        return weight

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.targets[name] = self._empty(*shape)
        return self.targets[name]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
