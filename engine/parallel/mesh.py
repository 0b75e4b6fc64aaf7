"""Which rank of a replica has which part of the model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from core.config.engine import EngineConfig
from core.errors import ConfigError
from engine.checkpoint.model_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Mesh:
    """``tensor * pipeline`` ranks: stages of consecutive layers, each split over ``tensor`` columns.

    Rank 0 is the first column of the *last* stage. It drives the others: so the logits are on the rank that has
    sampling parameters and text, and while it computes the last layers of one batch the other stages compute the next.
    """

    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    def stage_of(self, rank: int) -> int:
        """The rank's stage; 0 is the stage that embeds."""
        return self.pipeline - 1 - rank // self.tensor

    def column_of(self, rank: int) -> int:
        return rank % self.tensor

    def rank_at(self, stage: int, column: int) -> int:
        return (self.pipeline - 1 - stage) * self.tensor + column

    def check(self, config: DecoderConfig) -> None:
        """Raises ConfigError if the model cannot be split so."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if not config.plain:
            name = "model.tensor_parallel" if self.tensor > 1 else "model.pipeline_parallel"
            asked = self.tensor if self.tensor > 1 else self.pipeline
            raise ConfigError(name, asked, f"1 ({config.architecture} is computed by one rank)")
        if heads % self.tensor:
            expected = f"a divisor of the model's {heads} attention heads"
            raise ConfigError("model.tensor_parallel", self.tensor, expected)
        if kv_heads % self.tensor and self.tensor % kv_heads:
            expected = f"a divisor or a multiple of the model's {kv_heads} key-value heads"
            raise ConfigError("model.tensor_parallel", self.tensor, expected)
        if config.intermediate_size % self.tensor:
            expected = f"a divisor of the model's intermediate size {config.intermediate_size}"
            raise ConfigError("model.tensor_parallel", self.tensor, expected)
        if self.pipeline > config.num_hidden_layers:
            expected = f"at most the model's {config.num_hidden_layers} layers"
            raise ConfigError("model.pipeline_parallel", self.pipeline, expected)


ALONE = Mesh()


class Part:
    """One rank's part of a model.

    Attributes:
        layers: Its layers.
        config: The model's configuration, with the layers and sizes of this part.
        heads, kv_heads, inner, vocab: The attention heads, key-value heads, columns of the MLP and rows of the
            vocabulary head that it has. Where there are fewer key-value heads than columns, several columns share one.
    """

    def __init__(self, whole: DecoderConfig, mesh: Mesh, rank: int) -> None:
        self.whole = whole
        self.mesh = mesh
        self.rank = rank
        self.stage, self.column = mesh.stage_of(rank), mesh.column_of(rank)
        self.is_first, self.is_last = self.stage == 0, self.stage == mesh.pipeline - 1
        self.layers = _layers_of(self.stage, whole.num_hidden_layers, mesh.pipeline)
        self.heads = self._share(whole.num_attention_heads)
        self.kv_heads = self._kv_heads()
        self.inner = self._share(whole.intermediate_size)
        rows = -(-whole.vocab_size // mesh.tensor)
        first = min(self.column * rows, whole.vocab_size)
        self.vocab = range(first, min(first + rows, whole.vocab_size))
        self.config = dataclasses.replace(
            whole,
            num_hidden_layers=len(self.layers),
            num_attention_heads=len(self.heads),
            num_key_value_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            sliding_windows=whole.sliding_windows[self.layers.start : self.layers.stop],
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
    if config.sees:
        raise ConfigError("model.tensor_parallel", mesh.size, f"one rank: {config.sees} is not spread over several")
    if engine.profile:
        raise ConfigError("engine.device", engine.device, "a real device where a replica has several ranks")
    if engine.backend == "native":
        raise ConfigError("engine.backend", engine.backend, "auto, torch or xformers where a replica has several ranks")
    if engine.kv_dtype == "int8":
        raise ConfigError("engine.kv_dtype", engine.kv_dtype, "auto where a replica has several ranks")


def _layers_of(stage: int, num_layers: int, num_stages: int) -> range:
    """Layers of a stage; the remainder goes to the early stages, since the last one has the vocabulary head."""
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))
