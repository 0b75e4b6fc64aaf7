"""Runs steps: computes a batch, samples."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from farsight.core.errors import IntegrityError
from farsight.core.request import Fault, Request, SamplingParams
from farsight.engine.attention.layout import DecodeInputs, find_sample_rows, order_items
from farsight.engine.checkpoint.model_config import DecoderConfig, load_model_config, resolve_max_model_len
from farsight.engine.checkpoint.weights import Progress, load_weights
from farsight.engine.kv_pool import KVPool, pool_dtype
from farsight.engine.models.quantize import quantize_weights, tell_of_rounding
from farsight.engine.native.model import NativeBackend
from farsight.engine.runner import Launch, Runner
from farsight.engine.sampling.sampler import NO_TOKEN, PromptRows, Sampler, StepLogits, find_prompt_rows
from farsight.engine.sampling.step_rows import (
    RowsToPool,
    ends_prompt,
    find_rows_to_pool,
    pool_rows,
    prompt_states,
    sampled_rows,
    score_rows,
    tokens_that_stand,
)
from farsight.engine.sampling.token_masks import MaskedRows, begin_masks
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import ItemLogprobs, LoggedTokens, NoToken, PooledRows, StepFault
from farsight.engine.steps.backends import LaunchingBackend, ReadyBackend, StepBackend, make_backend, make_sampler
from farsight.engine.steps.careful_steps import CarefulSteps, fault_of
from farsight.engine.steps.decode_graphs import Wait
from farsight.kvcache import StepBatch, StepItem

_PADS = "\0pads"
"""Request id of the padding; no real request id contains a NUL."""


@dataclass(slots=True)
class _Ready:
    """A step that only decodes, made ready before its time.

    Attributes:
        order: Indices in ``batch`` of the items of ``inputs``.
        run: ``ReadyBackend.run_ready``.
        settled: Whether the step chooses the token of each (``Sampler.settles``), and no more is wanted.
        token_ids: The last known token of each item of ``batch``, if its sequence does not have it yet.
    """

    batch: StepBatch
    order: list[int]
    inputs: DecodeInputs
    run: Callable[[DecodeInputs], StepLogits]
    settled: bool
    token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way on the device, of which nothing is known yet.

    Attributes:
        order: Indices in ``batch`` of the items that yield a token, by row.
    """

    batch: StepBatch
    order: list[int]
    wait: Wait


class ModelRunner(Runner):
    """A model with its KV pool. It changes the pool only, never the sequences that it gets.

    Args:
        pool: In the dtype of the weights, or in int8 where the backend computes so.
        backend: Computes the steps over the pool.
        max_model_len: Tokens a sequence may reach.
        careful: Runs steps that the device has no memory for in parts; None where they fail.
        sampler: Chooses the tokens; by default that of the backend.
        is_lost: Whether the device has become unusable for this process; asked after a step has failed.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pool: KVPool,
        backend: StepBackend,
        max_model_len: int,
        sampler: Sampler | None = None,
        careful: CarefulSteps | None = None,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.pool = pool
        self.backend = backend
        self.max_model_len = max_model_len
        self._careful = careful
        self._is_lost = is_lost
        self.sampler = sampler or make_sampler(backend, config.eos_token_ids)
        self._ready: _Ready | None = None
        self._launched: deque[_Launched] = deque()
        self._pads = Sequence.of(Request(_PADS, 0, "", (0,) * max_model_len, SamplingParams(1)))

    @classmethod
    def from_dir(
        cls,
        model_dir: Path,
        *,
        config: DecoderConfig | None = None,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        context_len: int = 0,
        backend: str = "auto",
        bits: int = 0,
        keep_quantized: bool = True,
        num_threads: int = 1,
        kv_dtype: str = "auto",
        progress: Progress | None = None,
        num_states: int = 0,
        num_checkpoints: int = 0,
    ) -> ModelRunner:
        """Loads the checkpoint in ``model_dir``, with a pool of ``num_blocks`` blocks.

        Args:
            config: That of the directory, if it is known already.
            context_len: Tokens that a sequence may reach by the configuration, if the pool holds them; 0 is the model's
                own context.
            backend: As in ``make_backend``.
            bits: Round the matrices to 8 or 4 bits; 0 leaves them as the checkpoint has them.
            keep_quantized: As in ``load_weights``.
            num_threads: As in ``make_backend``.
            kv_dtype: As ``engine.kv_dtype``.
            progress: As in ``load_weights``.
            num_states, num_checkpoints: As in ``KVPool``.

        Raises:
            InvalidValueError: The checkpoint cannot be used; names the reason.
        """
        config = config or load_model_config(model_dir)
        weights = load_weights(model_dir, config, dtype, keep_quantized=keep_quantized, progress=progress)
        found = weights.quantized_bits
        if bits:
            weights = quantize_weights(weights, bits)
        kind = pool_dtype(kv_dtype, dtype)
        pool = KVPool(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=kind,
            num_states=num_states,
            num_checkpoints=num_checkpoints,
        )
        max_model_len = min(resolve_max_model_len(config, context_len), pool.num_slots)
        steps = make_backend(backend, config, weights, pool, max_model_len, num_threads)
        if found and not bits and isinstance(steps, NativeBackend):
            tell_of_rounding(found)
        return cls(config, pool, steps, max_model_len, make_sampler(steps, config.eos_token_ids, backend))

    def look_ahead(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> bool:
        """Makes the inputs of a step that only decodes, while the step before it computes in another thread.

        ``execute`` of this very batch then takes them.

        Returns:
            Whether the step can also be executed before the one before it is booked, after ``go_on``: not where
            sampling looks at the tokens so far.
        """
        taking_part = [sequences[item.request_id] for item in batch.items]
        if not isinstance(self.backend, ReadyBackend):
            return False
        if any(each.prompt_logprobs is not None or each.sampling.pooling for each in taking_part):
            return False
        if any(
            each.images and item.start < each.images.end for each, item in zip(taking_part, batch.items, strict=True)
        ):
            return False  # the prompt ends with an image, whose rows are found when the step runs
        order = order_items(batch)
        inputs = DecodeInputs.ahead([batch.items[i] for i in order], sequences, self.pool.block_size)
        settled = all(self.sampler.settles(param) and param.logprobs is None for param in inputs.params)
        self._ready = _Ready(batch, order, inputs, self.backend.run_ready, settled)
        return not any(sequence.sampling.looks_back for sequence in taking_part)

    def go_on(self, batch: StepBatch, token_ids: list[int]) -> None:
        """Says the last known token of each item of a step that ``look_ahead`` has got ready."""
        if self._ready is None or self._ready.batch is not batch:
            raise IntegrityError("a step goes on that was not got ready")
        self._ready.token_ids = token_ids

    def launch(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> Launch:
        """Launches a step that is recorded and chooses its tokens itself; raises as ``execute``."""
        if self._launched:
            return Launch.BEFORE
        return Launch.NOW if self._launch(batch, sequences) else Launch.NOT

    def launch_after(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> bool:
        return self._launch(batch, sequences, self._launched[-1])

    def _launch(self, batch: StepBatch, sequences: Mapping[str, Sequence], before: _Launched | None = None) -> bool:
        """Launches a step, behind the step that yields its tokens if they are not known; False if it cannot."""
        if not isinstance(self.backend, LaunchingBackend) or batch.padding.items or batch.may_be_cut_off:
            return False
        if self._careful is not None and not self._careful.fits(batch):
            return False
        if not all(self._is_settled(item, sequences[item.request_id]) for item in batch.items):
            return False
        order, sources = order_items(batch), None
        if before is not None:
            rows = {before.batch.items[i].request_id: row for row, i in enumerate(before.order)}
            sources = [rows[batch.items[i].request_id] for i in order]
        wait = self.backend.launch([batch.items[i] for i in order], sequences, sources)
        if wait is None:
            return False
        self._launched.append(_Launched(batch, [i for i in order if batch.items[i].samples], wait))
        return True

    def _is_settled(self, item: StepItem, sequence: Sequence) -> bool:
        """Returns whether an item brings a token that the step chooses and nothing else, without rows of images."""
        sampling = sequence.sampling
        if sampling.logprobs is not None or sampling.pooling or item.drafts or sequence.image_problem:
            return False
        return self.sampler.settles(sampling)

    def forget_launched(self) -> None:
        while self._launched:
            self._launched.popleft().wait()  # the next step writes where the device may still read

    def _execute_launched(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Waits for the step launched first, of which ``batch`` is what is still wanted."""
        launched = self._launched.popleft()
        drawn = launched.wait()
        tokens = {launched.batch.items[i].request_id: token for i, token in zip(launched.order, drawn, strict=True)}
        found = [tokens.get(item.request_id) for item in batch.items]
        # Why a row has no token is seen by its logits, which are gone: the step runs again, and writes what it has.
        return self._execute(batch, sequences) if NO_TOKEN in found else found

    def execute(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Runs a step and samples.

        Args:
            sequences: Sequences by request id; at least those of the batch.

        Returns:
            The new token of each of ``batch.items``, in their order; None where the item does not sample. They are
            ``LoggedTokens`` if there is more to tell about an item.

        Raises:
            IntegrityError: An item asks for tokens or blocks that are not there.
            IterationCutOff: The step took longer than ``batch.cut_off_s``. It may have written keys and values of its
                own positions; a later step writes them again.
        """
        if self._launched:
            return self._execute_launched(batch, sequences)
        self.backend.cut_off_at_s = time.monotonic() + batch.cut_off_s
        if self._careful is None:
            return self._execute(batch, sequences)
        careful = self._careful
        return careful.execute(lambda part: self._execute(part, sequences), batch, sequences, whole=careful.fits(batch))

    def fault(self, error: Exception) -> StepFault:
        return fault_of(error, self._is_lost)

    @property
    def num_ooms(self) -> int:
        """How often the device has run out of memory."""
        return 0 if self._careful is None else self._careful.num_ooms

    def _execute(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Executes a step in one go."""
        ready = self._ready
        if ready is not None and ready.batch is batch:
            return self._execute_ready(ready, sequences)
        num_items = len(batch.items)
        if batch.padding.items:
            batch, sequences = self._with_padding(batch, sequences)
        order = order_items(batch)
        prompts = find_prompt_rows(batch, order, sequences)
        sampled = [i for i in order if batch.items[i].samples]
        masks = self._begin_masks([batch.items[i] for i in sampled], sequences)
        pools = find_rows_to_pool(batch, order, sequences)
        self.backend.keeps_middle = self.reads_states and any(
            ends_prompt(batch.items[i], sequences[batch.items[i].request_id]) for i in sampled
        )
        if prompts or pools:
            step, logprobs, pooled = self._run_with_more(batch, order, sequences, prompts, pools)
        else:
            step, logprobs, pooled = self.backend.run(batch, order, sequences), {}, {}
        found = LoggedTokens([None] * len(batch.items), logprobs, pooled=pooled)
        if sampled:
            self._sample(step, sampled, batch, sequences, found, masks)
        if step.middle is not None:
            found.states = prompt_states(step.middle, sampled, batch, sequences)
        del found[num_items:]
        found.failures = {i: failure for i, failure in found.failures.items() if i < num_items}  # pads need no tokens
        return found if found.tells_more else list(found)

    def _execute_ready(self, ready: _Ready, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Executes a step whose items all sample."""
        known = ready.token_ids
        ready.inputs.complete(None if known is None else [known[i] for i in ready.order])
        masks = self._begin_masks([ready.batch.items[i] for i in ready.order], sequences)
        step = ready.run(ready.inputs)
        found = LoggedTokens([None] * len(ready.order), {})
        if ready.settled and step.best is not None and NO_TOKEN not in step.best:
            for i, token in zip(ready.order, step.best, strict=True):
                found[i] = token
        else:
            self._sample(step, ready.order, ready.batch, sequences, found, masks)
        return found if found.tells_more else list(found)

    def _begin_masks(self, items: list[StepItem], sequences: Mapping[str, Sequence]) -> Future[MaskedRows] | None:
        return begin_masks(items, sequences, self.config.vocab_size)

    def _with_padding(
        self, batch: StepBatch, sequences: Mapping[str, Sequence]
    ) -> tuple[StepBatch, Mapping[str, Sequence]]:
        """Returns the step with its padding as items behind the others: rows like any, of a sequence of pads.

        The sequences of the batch attend to their own tokens alone, so ``Padding.context_tokens`` are not computed.
        """
        pads = tuple(item._replace(request_id=_PADS) for item in batch.padding.items)
        return StepBatch(batch.items + pads), {**sequences, _PADS: self._pads}

    def _run_with_more(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        prompts: list[PromptRows],
        pools: list[RowsToPool],
    ) -> tuple[StepLogits, dict[int, ItemLogprobs], dict[int, PooledRows]]:
        """Runs a step; returns ``StepBackend.run`` without ``more_rows``, and what the other rows bring."""
        more = [row for part in prompts for row in range(part.row, part.row + part.num_rows)]
        wanted = find_sample_rows([batch.items[i] for i in order])
        rows = sorted({*wanted, *more, *(row for part in pools for row in range(part.row, part.row + part.num_rows))})
        further = sorted(set(rows).difference(wanted))
        step = self.backend.run(batch, order, sequences, further, with_hidden=bool(pools))
        place = {row: i for i, row in enumerate(rows)}
        chosen = [place[row] for row in wanted]
        best = None if step.best is None else [step.best[i] for i in chosen]
        logprobs = {}
        if prompts:
            logprobs = self._prompt_logprobs(step.logits[[place[row] for row in more]], prompts, batch, sequences)
        pooled = {} if step.hidden is None else pool_rows(step.hidden, place, pools)
        pooled |= score_rows(step.logits, place, pools, batch, sequences)
        middle = None if step.middle is None else step.middle[chosen]
        return StepLogits(step.logits[chosen], best, middle=middle), logprobs, pooled

    @torch.inference_mode()
    def _sample(
        self,
        step: StepLogits,
        items: list[int],
        batch: StepBatch,
        sequences: Mapping[str, Sequence],
        found: LoggedTokens,
        masks: Future[MaskedRows] | None = None,
    ) -> None:
        """Adds the tokens of these items, log probabilities of the output, and why an item has no token."""
        params, positions, histories = sampled_rows([batch.items[i] for i in items], sequences)
        masked = None if masks is None else masks.result()
        sampled = self.sampler.sample(step.logits, params, positions, histories, step.best, masked)
        logged: list[tuple[int, int]] = []  # row and item
        row = 0
        for i in items:
            drafts = batch.items[i].drafts
            if params[row].pooling and i not in found.pooled:
                found.failures[i] = NoToken("a model on several ranks computes no embeddings", Fault.REQUEST)
            elif problem := sequences[batch.items[i].request_id].image_problem:
                found.failures[i] = NoToken(problem, Fault.SERVICE)
            elif sampled[row] == NO_TOKEN:
                why = None if masked is None else masked.problems.get(row)
                found.failures[i] = why or self.sampler.why_no_token(
                    step.logits, row, params[row], histories[row], masked
                )
            else:
                found[i] = sampled[row]
                if drafts:
                    found.further[i] = tokens_that_stand(sampled[row : row + 1 + len(drafts)], drafts)[1:]
                if params[row].logprobs is not None:
                    logged.append((row, i))
            row += 1 + len(drafts)
        if logged:
            self._log_tokens(step.logits, logged, params, sampled, found)

    def _log_tokens(
        self,
        logits: Tensor,
        logged: list[tuple[int, int]],
        params: list[SamplingParams],
        sampled: list[int],
        found: LoggedTokens,
    ) -> None:
        """Adds the log probabilities of the first token of each of these (row, item)."""
        rows = [row for row, _ in logged]
        tokens, num_top = [sampled[row] for row in rows], [params[row].logprobs or 0 for row in rows]
        each = self.sampler.token_logprobs(logits, rows, tokens, num_top)
        for (_, i), output in zip(logged, each, strict=True):
            found.logprobs.setdefault(i, ItemLogprobs()).output = output

    @torch.inference_mode()
    def _prompt_logprobs(
        self, logits: Tensor, prompts: list[PromptRows], batch: StepBatch, sequences: Mapping[str, Sequence]
    ) -> dict[int, ItemLogprobs]:
        """Returns, by index of the item, those of ``logits``, which are of one part of ``prompts`` after the other."""
        found = {}
        first = 0
        for part in prompts:
            sequence = sequences[batch.items[part.item].request_id]
            found[part.item] = ItemLogprobs(prompt=self.sampler.prompt_logprobs(logits, first, part, sequence))
            first += part.num_rows
        return found

    def logits(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[Tensor | None]:
        """Runs a step; returns logits (float32 ``[vocab]``) where ``execute`` returns a token."""
        order = order_items(batch)
        rows = iter(self.backend.run(batch, order, sequences).logits.clone())
        by_item = {i: next(rows) for i in order if batch.items[i].samples}
        return [by_item.get(i) for i in range(len(batch.items))]
