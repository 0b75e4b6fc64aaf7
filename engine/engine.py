"""The engine in one process, without Ray: the same scheduler, executor and worker, wired directly."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import InvalidValueError
from farsight.core.images import ImageSpan
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request, SamplingParams, check_token_ids
from farsight.engine.build import BY_ARRIVAL, build_worker
from farsight.engine.checkpoint.model_config import resolve_model_dir
from farsight.engine.emission import Output
from farsight.engine.step_results import IterationCutOff
from farsight.engine.worker import Worker
from farsight.kvcache import StepBatch
from farsight.policies.compose import configured_scheduler
from farsight.policies.replica.events import (
    Event,
    RequestsAborted,
    RequestsArrived,
    SendPlan,
    WorkerConnected,
    WorkerReported,
)
from farsight.policies.replica.scheduler import ReplicaScheduler
from farsight.tokenization.gguf_file import held_header
from farsight.tokenization.model_files import load_model_texts

if TYPE_CHECKING:
    from farsight.engine.parallel.links import Ranks

Prompt = str | list[int] | tuple[int, ...]
"""Plain text, whatever control tokens it names; or token ids as the model sees them, control tokens among them."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A whole answer."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


class Engine:
    """Continuous batching over one model, driven by ``step``.

    Args:
        model: A directory, GGUF file or hub id; its architecture is one of ``engine.checkpoint.families``.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        engine: Batch limits, block size, KV memory, context length, threads.
        scheduler: Preset and its parameters; by default ``fcfs``, since nothing here forecasts lengths.
        clock: Seconds, monotonic.
        ranks: The other processes of a model that is spread over several, from ``engine.parallel.links.LocalRanks``.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        engine: EngineConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks | None = None,
    ) -> None:
        engine = engine or EngineConfig()
        scheduler = scheduler or BY_ARRIVAL
        model_dir = resolve_model_dir(str(model))
        _header = held_header(model_dir)
        texts = load_model_texts(model_dir)
        self.tokenizer = texts.tokenizer
        self._encoder = texts.encoder
        self.worker: Worker = build_worker(
            model_dir,
            dtype,
            engine,
            incarnation="engine",
            scheduler=scheduler,
            ranks=ranks,
            clock=clock,
            tokenizer=texts.tokenizer,
        )
        self.scheduler: ReplicaScheduler = configured_scheduler(scheduler, engine.max_num_seqs)
        self._clock = clock
        self._ids = itertools.count()
        self._begun: deque[StepBatch] = deque()
        self._handle(WorkerConnected(self.worker.take_over()))

    def submit(self, prompt: Prompt, sampling: SamplingParams, images: SequenceOf[ImageSpan] = ()) -> str:
        """Queues a request and returns its id.

        Args:
            images: Those of the prompt's tokens that stand for images, with their rows.

        Raises:
            InvalidValueError: prompt and output cannot fit the context or the KV pool, or there are token ids that the
                model does not have.
        """
        request = self._request(prompt, sampling, images)
        self._handle(RequestsArrived((request,)))
        return request.request_id

    def _request(self, prompt: Prompt, sampling: SamplingParams, images: SequenceOf[ImageSpan] = ()) -> Request:
        """Returns a request that the model can answer; raises as ``submit``."""
        request = Request(f"r{next(self._ids)}", 0, "", self._encode(prompt), sampling, images=tuple(images))
        limit, vocab_size = self.worker.ready.max_model_len, self.worker.ready.vocab_size
        check_token_ids("prompt", request.prompt_ids, vocab_size)
        sampling.check_vocabulary(vocab_size)
        if request.max_total_len > limit:
            raise InvalidValueError("max_tokens", sampling.max_new_tokens, f"at most {limit - request.prompt_len}")
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request without an answer; its KV is free at the next step."""
        self._handle(RequestsAborted(((request_id, 0),)))

    @property
    def idle(self) -> bool:
        return self.scheduler.num_waiting + self.scheduler.num_admitted == 0

    def step(self) -> list[TokenDelta]:
        """Runs one step; returns what it added to each sequence."""
        while len(self._begun) < self.worker.executor.max_in_flight and (batch := self.worker.begin_step()):
            self._begun.append(batch)
        outputs: list[Output] = []
        if not self._begun:
            self.worker.wait_for_copy()
        else:
            batch = self._begun.popleft()
            began_at = self._clock()
            self.worker.launch(batch)
            try:
                tokens = self.worker.execute(batch)
            except IterationCutOff:
                self.worker.cut_off(batch, self._clock() - began_at)
            else:
                outputs = self.worker.finish_step(batch, tokens, self._clock() - began_at)
        self.report()
        return [output.delta for output in outputs]

    def report(self) -> None:
        """Tells the scheduler what the steps have done; the next step follows the plan that it makes of that."""
        report = self.worker.executor.report()
        self.worker.executor.acknowledge(report.report_seq)
        self._handle(WorkerReported(report))

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        sampling: SamplingParams | list[SamplingParams],
        images: SequenceOf[SequenceOf[ImageSpan]] = (),
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order; ``images`` are those of each, or none at all.

        Raises:
            InvalidValueError: As ``submit``, before any of them is queued.
        """
        each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        seen = images or [()] * len(prompts)
        requests = [self._request(*given) for given in zip(prompts, each, seen, strict=True)]
        self._handle(RequestsArrived(tuple(requests)))  # one plan for all of them
        deltas: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
        while not self.idle:
            for delta in self.step():
                deltas[delta.request_id].append(delta)
        return [_completion(request.prompt_ids, deltas[request.request_id]) for request in requests]

    def embed(self, prompts: SequenceOf[Prompt], pooling: str = "last") -> list[list[float]]:
        """Returns vectors of the prompts, in their order, as the pooling leaves them: not brought to any length.

        Raises:
            InvalidValueError: As ``submit``; or the model does not compute this.
        """
        requests = [self._request(prompt, SamplingParams(1, pooling=pooling)) for prompt in prompts]
        self._handle(RequestsArrived(tuple(requests)))
        found: dict[str, list[float]] = {}
        while not self.idle:
            for delta in self.step():
                if delta.error is not None:
                    raise InvalidValueError("pooling", pooling, delta.error)
                found[delta.request_id] = array("f", delta.vector).tolist()
        return [found[request.request_id] for request in requests]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._encoder.encode(prompt, ((0, len(prompt)),), add_special_tokens=True).ids
        return tuple(prompt)

    def _handle(self, event: Event) -> None:
        for instruction in self.scheduler.handle(event, self._clock()):
            if isinstance(instruction, SendPlan):
                self.worker.offer_plan(instruction.plan)

    def check_integrity(self) -> None:
        """Raises IntegrityError if any part disagrees with another."""
        self.scheduler.check_integrity()
        self.worker.check_integrity()


def _completion(prompt_ids: tuple[int, ...], deltas: list[TokenDelta]) -> RequestOutput:
    return RequestOutput(
        prompt_ids=prompt_ids,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        finish_reason=deltas[-1].finish_reason or "",
    )
