"""The thread that steps. Nothing else stands between the end of one step and the beginning of the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from core.messages import StepSample

if TYPE_CHECKING:
    from engine.worker import Output, Worker
    from kvcache import StepBatch


class StepLoop:
    """Runs a worker's steps back to back.

    The worker's bookkeeping belongs to whoever holds the lock: this thread between two steps, the event loop of the
    shell at any other moment. Nobody holds it while the model computes.

    Args:
        on_step: Called from the stepping thread after each step with what it put out, what it measured, and the
            idle time before it (None if there was no step right before).
    """

    def __init__(self, worker: Worker, on_step: Callable[[list[Output], StepSample, float | None], object]) -> None:
        self._worker = worker
        self._on_step = on_step
        self._lock = threading.Lock()

    @property
    def locked(self) -> AbstractContextManager[bool]:
        """Between steps; the worker may be looked at and changed."""
        return self._lock

    def run(self) -> None:
        """Steps until nothing can run."""
        ended_at: float | None = None
        with self._lock:
            batch = self._worker.begin_step()
        while batch is not None:
            began_at = time.perf_counter()
            gap_s = None if ended_at is None else began_at - ended_at
            outputs, next_batch, ended_at = self._step(batch)
            self._on_step(outputs, _sample(batch, ended_at - began_at), gap_s)
            batch = next_batch

    def _step(self, batch: StepBatch) -> tuple[list[Output], StepBatch | None, float]:
        failure: Exception | None = None
        try:
            tokens = self._worker.execute(batch)
        except Exception as error:  # whatever torch raises ends the step's requests, not the worker
            failure = error
        ended_at = time.perf_counter()
        with self._lock:
            if failure is None:
                outputs = self._worker.finish_step(batch, tokens)
            else:
                outputs = self._worker.fail_step(batch, failure)
            return outputs, self._worker.begin_step(), ended_at


def _sample(batch: StepBatch, duration_s: float) -> StepSample:
    prefill = decode_seqs = context = 0
    for item in batch.items:
        context += item.start + item.num_tokens
        if item.num_tokens == 1:
            decode_seqs += 1
        else:
            prefill += item.num_tokens
    return StepSample(prefill, decode_seqs, context, duration_s)
