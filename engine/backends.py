"""How a step is computed: by torch operations, the reference, or by one compiled call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from core.errors import ConfigError
from engine.attention import AttentionBackend
from engine.kv_pool import KVPool
from engine.layout import build_layout
from engine.model import DecoderModel
from engine.model_config import ModelConfig
from engine.native.layout import build_native_step
from engine.native.library import NativeUnavailable
from engine.native.model import NativeModel, native_problem
from engine.sequence import Sequence
from engine.torch_attention import TorchAttention
from engine.weights import ModelWeights
from kvcache import StepBatch

logger = logging.getLogger(__name__)


class StepLogits(NamedTuple):
    """What a step has computed for the rows whose logits are wanted, in their order; valid until the next step.

    Attributes:
        logits: float32 ``[R, vocab]``.
        best: The likeliest token of each row, where that has been found on the way.
    """

    logits: Tensor
    best: list[int] | None


class StepBackend(Protocol):
    """A model that can run steps."""

    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
    ) -> StepLogits:
        """Runs a step, its items in ``order``: writes keys and values into the pool.

        Args:
            more_rows: Rows of the step whose logits are wanted beside those that sample.

        Raises:
            IntegrityError: an item asks for tokens or blocks that are not there.
        """
        ...


class TorchBackend:
    """Torch operations, one by one."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pool: KVPool,
        max_len: int,
        attention: AttentionBackend | None = None,
    ) -> None:
        self._model = DecoderModel(config, weights, max_len)
        self._pool = pool
        self._attention = attention or TorchAttention(config.sliding_windows)

    @torch.inference_mode()
    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
    ) -> StepLogits:
        """See ``StepBackend.run``."""
        layout = build_layout(batch, order, sequences, self._pool.block_size, more_rows=more_rows)
        if len(layout.opened_blocks):
            self._pool.clear_blocks(layout.opened_blocks)
        attention = self._attention.begin_step(layout, self._pool)
        return StepLogits(self._model.forward(layout, self._pool, attention), None)


class NativeBackend:
    """One compiled call, without the interpreter's lock."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, pool: KVPool, max_len: int) -> None:
        self._model = NativeModel(config, weights, pool, max_len)
        self._block_size = pool.block_size

    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
    ) -> StepLogits:
        """See ``StepBackend.run``."""
        logits, best = self._model.forward(build_native_step(batch, order, sequences, self._block_size, more_rows))
        return StepLogits(logits, best.tolist())


def make_backend(name: str, config: ModelConfig, weights: ModelWeights, pool: KVPool, max_len: int) -> StepBackend:
    """The backend of that name; ``auto`` is the compiled one where it can be had.

    Raises:
        ConfigError: ``native`` was asked for and cannot be had.
    """
    if name == "torch":
        return TorchBackend(config, weights, pool, max_len)
    problem = native_problem(config, pool.dtype, pool.block_size)
    if problem is None:
        try:
            return NativeBackend(config, weights, pool, max_len)
        except NativeUnavailable as error:
            problem = str(error)
    if name == "native":
        raise ConfigError("engine.backend", name, f"auto or torch ({problem})")
    logger.warning("steps are computed by torch operations, several times slower than compiled: %s", problem)
    return TorchBackend(config, weights, pool, max_len)
