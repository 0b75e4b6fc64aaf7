"""Backends of a step: torch operations, the reference, or one compiled call."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from farsight.core.errors import ConfigError
from farsight.engine.attention.attention import AttentionBackend, StepLayout
from farsight.engine.attention.choice import KERNELS
from farsight.engine.attention.layout import (
    DecodeInputs,
    StepSizes,
    build_layout,
    check_row_tokens,
    fill_rows,
    find_given_rows,
    find_sample_rows,
    layout_of,
)
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.weights import ModelWeights
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.model import DecoderModel, last_hidden
from farsight.engine.native.library import NativeUnavailable
from farsight.engine.native.model import NativeBackend, matrix_problem, native_problem
from farsight.engine.native.sampler import NativeSampler
from farsight.engine.sampling.device_draws import DeviceDraws, DeviceSampler, Draws
from farsight.engine.sampling.sampler import Sampler, StepLogits, likeliest
from farsight.engine.sequence import Sequence
from farsight.engine.steps.compiles import CompileCounter
from farsight.engine.steps.decode_graphs import DecodeGraphs, LaunchedTokens, Wait
from farsight.engine.steps.mixed_graphs import MixedGraphs, MixedSize
from farsight.engine.steps.recording import Capture
from farsight.kvcache import StepBatch, StepItem

logger = logging.getLogger(__name__)


class StepBackend(Protocol):
    """A model that can run steps.

    Attributes:
        cut_off_at_s: Instant of ``time.monotonic`` after which no further layer of the step begins.
        keeps_middle: Whether ``StepLogits.middle`` is wanted of the next step; a backend that replays recorded steps,
            or has ranks, leaves it out.
    """

    cut_off_at_s: float
    keeps_middle: bool

    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
        *,
        with_hidden: bool = False,
    ) -> StepLogits:
        """Runs a step, its items in ``order``: writes keys and values into the pool.

        Args:
            more_rows: Further rows of the step whose logits are wanted, beside those that sample.
            with_hidden: Whether their hidden states are wanted too.

        Raises:
            IntegrityError: an item asks for tokens or blocks that are not there.
            IterationCutOff: ``cut_off_at_s`` has come.
        """
        ...


@runtime_checkable
class ReadyBackend(StepBackend, Protocol):
    """A model that also runs steps whose inputs others have made."""

    def run_ready(self, inputs: DecodeInputs) -> StepLogits:
        """Runs a step that only decodes and whose inputs are ready.

        Raises:
            IntegrityError: The vocabulary lacks a token.
        """
        ...


@runtime_checkable
class LaunchingBackend(ReadyBackend, Protocol):
    """A model that also launches steps without waiting for them."""

    def launch(
        self, items: list[StepItem], sequences: Mapping[str, Sequence], sources: list[int] | None = None
    ) -> Wait | None:
        """Launches a step of ordered items, which chooses its tokens itself: one of each item that samples.

        Args:
            sources: For each item, which has one token then: the row of the step launched last that yields that token.
                None if tokens are known.

        Returns:
            None if such a step is not recorded.

        Raises:
            IntegrityError: An item asks for tokens or blocks that are not there, or the vocabulary lacks a token.
        """
        ...


class TorchBackend:
    """Torch operations, one by one."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: ModelWeights,
        pool: KVPool,
        max_len: int,
        attention: AttentionBackend | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self._model = DecoderModel(config, weights, max_len, compiled=compiled)
        self._pool = pool
        self._attention = attention or TorchAttention.of_model(config)
        self.cut_off_at_s = math.inf
        self.keeps_middle = False

    @torch.inference_mode()
    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
        *,
        with_hidden: bool = False,
    ) -> StepLogits:
        size, vocab_size = self._pool.block_size, self._model.config.vocab_size
        layout = build_layout(batch, order, sequences, size, vocab_size, self._pool.device, more_rows)
        states = self._pool.states
        if states is None:
            return self._forward(layout, with_hidden=with_hidden)
        items = [batch.items[i] for i in order]
        with states.step(items, sequences, may_be_cut_off=self.cut_off_at_s < math.inf) as rows:
            layout = dataclasses.replace(layout, state_rows=rows, state_keeps=states.keeps_of(items))
            return self._forward(layout, with_hidden=with_hidden)

    @torch.inference_mode()
    def run_ready(self, inputs: DecodeInputs) -> StepLogits:
        check_row_tokens(inputs.rows, self._model.config.vocab_size)
        layout, states = (
            layout_of(inputs.items, inputs.rows, self._pool.block_size, self._pool.device),
            self._pool.states,
        )
        if states is None:
            return self._forward(layout)
        with states.step(inputs.items, {}, may_be_cut_off=False) as rows:
            return self._forward(dataclasses.replace(layout, state_rows=rows))

    def _forward(self, layout: StepLayout, *, with_hidden: bool = False) -> StepLogits:
        if self._attention.reads_whole_blocks and len(layout.opened_blocks):
            self._pool.clear_blocks(layout.opened_blocks)
        self._model.cut_off_at(self.cut_off_at_s)
        attention = self._attention.begin_step(layout, self._pool)
        rows, middle = self._model.rows_and_middle(layout, self._pool, attention, keeps_middle=self.keeps_middle)
        return self._found(rows, with_hidden=with_hidden)._replace(middle=middle)

    def _found(self, rows: Tensor, *, with_hidden: bool) -> StepLogits:
        """Returns what is wanted of rows behind the last layer."""
        hidden = last_hidden(rows, self._model.config, self._model.weights.norm) if with_hidden else None
        return StepLogits(self._model.logits(rows), None, hidden)


class GraphBackend(TorchBackend):
    """Torch operations; steps that only decode, and those with prompts up to a size, are recorded and replayed.

    Attributes:
        compiles: Counts kernels compiled while serving, once the owner has begun it.
        draws: Chooses the tokens of recorded steps, by a kernel; None where there is none.

    Args:
        sizes: Sizes of the recorded steps.
        capture: Records work.
        synchronize: Returns when the device has done all launched work. A step that samples waits for its tokens; one
            that does not would end for the host before it has begun, and its time would be wrong.
        compiled: As for ``DecoderModel``.
        draws: As the attribute; by default those of ``make_draws``.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: ModelWeights,
        pool: KVPool,
        max_len: int,
        attention: AttentionBackend,
        sizes: StepSizes,
        capture: Capture,
        synchronize: Callable[[], object],
        *,
        compiled: bool = False,
        draws: Draws | None = None,
    ) -> None:
        super().__init__(config, weights, pool, max_len, attention, compiled=compiled)
        self.compiles = CompileCounter()
        self._synchronize = synchronize
        self._launched = LaunchedTokens(sizes.rows[-1], pool.device)
        self.draws = draws or make_draws(sizes, config, pool.device)
        self._mixed = MixedGraphs(self._model, pool, attention, sizes, capture)  # the largest first: they share memory
        self._graphs = DecodeGraphs(self._model, pool, attention, sizes, capture, self._launched, self.draws)

    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
        *,
        with_hidden: bool = False,
    ) -> StepLogits:
        items = [batch.items[i] for i in order]
        recorded = items and not find_given_rows(items, sequences)
        size = self._graphs.find(items) if recorded and not more_rows and not with_hidden else None
        if size is not None:
            return StepLogits(*self._graphs.run(size, self._inputs(items, sequences)))
        mixed = self._mixed.find(items) if recorded else None
        if mixed is None:
            found = super().run(batch, order, sequences, more_rows, with_hidden=with_hidden)
        else:
            found = self._run_mixed(mixed, items, sequences, more_rows, with_hidden=with_hidden)
        if not len(found.logits):
            self._synchronize()
        return found

    def run_ready(self, inputs: DecodeInputs) -> StepLogits:
        size = self._graphs.find(inputs.items)
        return super().run_ready(inputs) if size is None else StepLogits(*self._graphs.run(size, inputs))

    @torch.inference_mode()
    def _run_mixed(
        self,
        size: MixedSize,
        items: list[StepItem],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
        *,
        with_hidden: bool = False,
    ) -> StepLogits:
        """Launches a step, waits for nothing."""
        filled = fill_rows(items, sequences, self._pool.block_size)
        rows = self._mixed.launch(size, items, filled, find_sample_rows(items, more_rows))
        return self._found(rows, with_hidden=with_hidden)

    @torch.inference_mode()
    def launch(
        self, items: list[StepItem], sequences: Mapping[str, Sequence], sources: list[int] | None = None
    ) -> Wait | None:
        size = self._graphs.find(items)
        if size is not None:
            return self._graphs.launch(size, self._inputs(items, sequences, known=sources is None), sources)
        mixed = None if sources is not None or find_given_rows(items, sequences) else self._mixed.find(items)
        if mixed is None:
            return None
        logits = self._run_mixed(mixed, items, sequences).logits
        self._choose(logits, [item for item in items if item.samples], sequences)
        return self._launched.begin_reading(len(logits))

    def _choose(self, logits: Tensor, items: list[StepItem], sequences: Mapping[str, Sequence]) -> None:
        """Chooses the tokens of items that sample, without waiting for them."""
        tokens = self._launched.tokens[: len(logits)]
        if self.draws is None:
            tokens.copy_(likeliest(logits))
        else:
            params = [sequences[item.request_id].sampling for item in items]
            self.draws.fill(params, [item.start + item.num_tokens for item in items])
            self.draws.draw(logits, tokens)

    def _inputs(self, items: list[StepItem], sequences: Mapping[str, Sequence], *, known: bool = True) -> DecodeInputs:
        inputs = DecodeInputs.ahead(items, sequences, self._pool.block_size)
        inputs.complete(None if known else [0] * len(items))
        return inputs


def make_backend(
    name: str, config: DecoderConfig, weights: ModelWeights, pool: KVPool, max_len: int, num_threads: int = 1
) -> StepBackend:
    """Makes the backend of that name on the CPU; ``auto`` is the compiled one where it is available.

    Args:
        num_threads: Threads of the compiled step; torch operations use those of ``torch.set_num_threads``.

    Raises:
        ConfigError: ``native`` or kernels of a GPU were asked for and are not available, or only torch operations
            are available and the pool is in int8.
    """
    if name in KERNELS:
        raise ConfigError("engine.backend", name, f"auto, native or torch ({name} computes on a GPU)")
    if name == "torch":
        _refuse_int8(pool, "the backend is torch")
        return TorchBackend(config, weights, pool, max_len)
    if config.latent is not None:
        _refuse_int8(pool, "latents are kept in the model's type")
    problem = native_problem(config, weights.embedding.dtype, pool.block_size) or matrix_problem(weights)
    if problem is None:
        try:
            return NativeBackend(config, weights, pool, max_len, num_threads)
        except NativeUnavailable as error:
            problem = str(error)
    if name == "native":
        raise ConfigError("engine.backend", name, f"auto or torch ({problem})")
    _refuse_int8(pool, problem)
    logger.warning(
        "steps are computed by torch operations: several times slower than compiled, without speculation and keys and "
        "values in 8 bits, and what else is computed may change a request's tokens (%s)",
        problem,
    )
    return TorchBackend(config, weights, pool, max_len)


def make_draws(sizes: StepSizes, config: DecoderConfig, device: torch.device) -> Draws | None:
    """Makes what draws tokens on a device, for the largest step; None where that is no GPU."""
    return DeviceDraws(sizes.rows[-1], config.vocab_size, device) if device.type == "cuda" else None


def make_sampler(backend: StepBackend, eos_token_ids: tuple[int, ...], name: str = "torch") -> Sampler:
    """Makes the sampler beside a backend: a kernel on a GPU, compiled beside a compiled step, and where ``auto`` has
    torch on the CPU.

    Args:
        name: As in ``make_backend``.
    """
    if isinstance(backend, NativeBackend):
        return NativeSampler(eos_token_ids, backend.model)
    if isinstance(backend, GraphBackend) and backend.draws is not None:
        return DeviceSampler(eos_token_ids, backend.draws)
    if name == "auto":
        with contextlib.suppress(NativeUnavailable):
            return NativeSampler(eos_token_ids)
    return Sampler(eos_token_ids)


def _refuse_int8(pool: KVPool, why: str) -> None:
    """Raises ConfigError if torch operations, which are to compute, cannot read the pool."""
    if pool.dtype == torch.int8:
        raise ConfigError("engine.kv_dtype", "int8", f"auto, or what the compiled step can run ({why})")
