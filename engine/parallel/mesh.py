"""Which rank of a replica has which part of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError
from farsight.engine.checkpoint.families.record import Experts
from farsight.engine.checkpoint.model_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Mesh:
    """``tensor * pipeline`` ranks: stages of consecutive layers, each split over ``tensor`` columns.

    Attributes:
        whole_experts: Whether each column has some of the experts as a whole, in place of a share of every expert.

    Rank 0 is the first column of the *last* stage. It drives the others: so the logits are on the rank that has
    sampling parameters and text, and while it computes the last layers of one batch the other stages compute the next.
    """

    tensor: int = 1
    pipeline: int = 1
    whole_experts: bool = False

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    def stage_of(self, rank: int) -> int:
        """Returns the rank's stage; 0 is the stage that embeds."""
        return self.pipeline - 1 - rank // self.tensor

    def column_of(self, rank: int) -> int:
        return rank % self.tensor

    def rank_at(self, stage: int, column: int) -> int:
        return (self.pipeline - 1 - stage) * self.tensor + column

    def check(self, config: DecoderConfig) -> None:
        """Raises ConfigError if the model cannot be split so."""
        if self.whole_experts:
            self._check_experts(config)
        if self.tensor > 1:
            self._check_columns(config)
        if config.blocks.unit_head and self.size > 1:
            name = "model.tensor_parallel" if self.tensor > 1 else "model.pipeline_parallel"
            expected = f"1 ({config.architecture} brings its vocabulary head to length 1, which one rank does)"
            raise ConfigError(name, max(self.tensor, self.pipeline), expected)
        if self.pipeline > config.num_hidden_layers:
            expected = f"at most the model's {config.num_hidden_layers} layers"
            raise ConfigError("model.pipeline_parallel", self.pipeline, expected)

    def _check_experts(self, config: DecoderConfig) -> None:
        if config.experts is None or self.tensor == 1:
            expected = "false for a model without experts" if config.experts is None else "model.tensor_parallel >= 2"
            raise ConfigError("model.expert_parallel", True, expected)
        if config.experts.count < self.tensor:
            expected = f"at most the model's {config.experts.count} experts"
            raise ConfigError("model.tensor_parallel", self.tensor, expected)

    def _check_columns(self, config: DecoderConfig) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        reason = _undivided(config)
        if reason:
            expected = (
                f"1 ({config.architecture} has {reason}; stages of layers can be spread: model.pipeline_parallel)"
            )
            raise ConfigError("model.tensor_parallel", self.tensor, expected)
        if heads % self.tensor:
            expected = f"a divisor of the model's {heads} attention heads"
            raise ConfigError("model.tensor_parallel", self.tensor, expected)
        if kv_heads % self.tensor and self.tensor % kv_heads:
            expected = f"a divisor or a multiple of the model's {kv_heads} key-value heads"
            raise ConfigError("model.tensor_parallel", self.tensor, expected)
        for name, size in self._widths(config):
            if size % self.tensor:
                raise ConfigError("model.tensor_parallel", self.tensor, f"a divisor of the model's {name} size {size}")
        if config.experts is not None and not self.whole_experts and "{}" not in config.names.expert_down:
            expected = f"true ({config.architecture} keeps its experts in one tensor; each column gets some of them)"
            raise ConfigError("model.expert_parallel", False, expected)

    def _widths(self, config: DecoderConfig) -> Iterator[tuple[str, int]]:
        """Yields widths of which each column computes a share."""
        experts = config.experts
        if experts is None or not all(experts.layers):
            yield "intermediate", config.intermediate_size
        if experts is not None:
            yield "shared experts'", experts.shared_inner
            if not self.whole_experts:
                yield "experts'", experts.inner


ALONE = Mesh()


def _undivided(config: DecoderConfig) -> str:
    """Returns what a column cannot have a share of; empty where nothing is so."""
    if config.latent is not None:
        return "one latent for all heads"
    if config.blocks.head_norm == "all":
        return "a norm over all heads"
    if config.blocks.alibi:
        return "slopes that follow from a head's number"
    return "" if config.names.in_order else "rows of several heads that lie among each other"


class Part:
    """One rank's part of a model.

    Attributes:
        layers: Its layers.
        config: The model's configuration, with the layers and sizes of this part.
        heads, kv_heads, inner, vocab: The attention heads, key-value heads, columns of the MLP and rows of the
            vocabulary head that it has. Where there are fewer key-value heads than columns, several columns share one.
        experts: Numbers of the experts that it has, or has a share of.
        expert_inner, shared_inner: Columns that it has of each of its experts, and of those that every token takes.
    """

    def __init__(self, whole: DecoderConfig, mesh: Mesh, rank: int) -> None:
        self.whole = whole
        self.mesh = mesh
        self.rank = rank
        self.stage, self.column = mesh.stage_of(rank), mesh.column_of(rank)
        self.is_first, self.is_last = self.stage == 0, self.stage == mesh.pipeline - 1
        self.layers = _spread(self.stage, whole.num_hidden_layers, mesh.pipeline)
        self.heads = self._share(whole.num_attention_heads)
        self.kv_heads = self._kv_heads()
        self.inner = self._share(whole.intermediate_size)
        self.experts = self.expert_inner = self.shared_inner = range(0)
        if whole.experts is not None:
            self._take_experts(whole.experts)
        rows = -(-whole.vocab_size // mesh.tensor)
        first = min(self.column * rows, whole.vocab_size)
        self.vocab = range(first, min(first + rows, whole.vocab_size))
        own = slice(self.layers.start, self.layers.stop)
        self.config = dataclasses.replace(
            whole,
            num_hidden_layers=len(self.layers),
            num_attention_heads=len(self.heads),
            num_key_value_heads=len(self.kv_heads),
            intermediate_size=len(self.inner) or 1,  # where no layer has a plain MLP, it may be anything
            sliding_windows=whole.sliding_windows[own],
            rotaries=None if whole.rotaries is None else whole.rotaries[own],
            experts=None if whole.experts is None else self._narrow(whole.experts),
        )

    def _take_experts(self, experts: Experts) -> None:
        whole = self.mesh.whole_experts
        every = range(experts.count)
        self.experts = _spread(self.column, experts.count, self.mesh.tensor) if whole else every
        self.expert_inner = range(experts.inner) if whole else self._share(experts.inner)
        self.shared_inner = self._share(experts.shared_inner)

    def _narrow(self, experts: Experts) -> Experts:
        """Returns their record with the layers and widths of this part; the router scores all of them."""
        return dataclasses.replace(
            experts,
            layers=experts.layers[self.layers.start : self.layers.stop],
            inner=len(self.expert_inner),
            shared_inner=len(self.shared_inner),
        )

    def _share(self, size: int) -> range:
        each = size // self.mesh.tensor
        return range(self.column * each, (self.column + 1) * each)

    def _kv_heads(self) -> range:
        kv_heads, columns = self.whole.num_key_value_heads, self.mesh.tensor
        if kv_heads >= columns:
            return self._share(kv_heads)
        head = self.column * kv_heads // columns
        return range(head, head + 1)


def check_parallel(mesh: Mesh, config: DecoderConfig, engine: EngineConfig) -> None:
    """Raises ConfigError if the model cannot run so over several ranks."""
    mesh.check(config)
    if config.shapes is not None:
        raise ConfigError(
            "model.tensor_parallel", mesh.size, f"one rank: layers of {config.architecture} differ in shape"
        )
    if config.sees:
        raise ConfigError("model.tensor_parallel", mesh.size, f"one rank: {config.sees} is not spread over several")
    if engine.profile:
        raise ConfigError("engine.device", engine.device, "a real device where a replica has several ranks")
    if engine.backend == "native":
        raise ConfigError("engine.backend", engine.backend, "any other where a replica has several ranks")
    if engine.kv_dtype == "int8":
        raise ConfigError("engine.kv_dtype", engine.kv_dtype, "auto where a replica has several ranks")


def _spread(index: int, count: int, parts: int) -> range:
    """Returns what part ``index`` has of ``count``; the remainder goes to the early parts, since the last stage has the
    vocabulary head as well."""
    each, more = divmod(count, parts)
    first = index * each + min(index, more)
    return range(first, first + each + (index < more))
