"""The thread that runs the steps, and the time that a step may take before its worker counts as hung.

Nothing else stands between the end of one step and the beginning of the next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from farsight.core.costs import StepCost
from farsight.core.errors import RankLost, WorkerBroken
from farsight.core.messages.step_times import StepSample
from farsight.engine.runner import Launch
from farsight.engine.step_results import IterationCutOff, StepFault
from farsight.kvcache.step_batch import step_sample

if TYPE_CHECKING:
    from farsight.engine.emission import Emission, Output
    from farsight.engine.worker import Worker
    from farsight.kvcache import StepBatch


from farsight.estimator.step_profile import StepProfile

MOST_TIMES = 20.0
"""A step may take this many times its predicted seconds, plus a fixed time."""

FIRST_STEPS_S = 600.0
"""Seconds that a step may take while step costs are unknown: the first steps may compile kernels."""


MAX_SAMPLES = 64
"""Most measured steps that are kept until the next call of ``bound_s``, which learns from them."""


LEAST_TO_LOOK_AHEAD = 64
"""Fewest sequences of a step for which a helper thread prepares the next step: waking the thread takes 50 us."""


class StepBounds:
    """Learns the durations of this worker's steps, and bounds the next ones.

    Args:
        stall_s: The fixed time in seconds.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._profile = StepProfile()
        self._samples: deque[StepSample] = deque(maxlen=MAX_SAMPLES)

    def add(self, sample: StepSample) -> None:
        """Adds a measured step."""
        self._samples.append(sample)

    @property
    def cost(self) -> StepCost | None:
        """The costs of steps, as learned by the last call of ``bound_s``; None before that."""
        return self._profile.cost()

    def bound_s(self, step: StepSample | None) -> float:
        """Returns the longest duration in seconds of a step with this work, or of the work between two steps for None.

        The duration in ``step`` is not used.
        """
        if step is None:
            return self._stall_s
        self._profile.observe(self._samples)
        self._samples.clear()
        price_s = self._profile.step_time_s(
            step.prefill_tokens, step.decode_seqs, step.context_tokens, step.prefill_pairs
        )
        return max(FIRST_STEPS_S, self._stall_s) if price_s is None else self._stall_s + MOST_TIMES * price_s


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was run.

    Attributes:
        emissions: New tokens, to be rendered; empty if the step failed.
        failures: What the clients are told if the step failed.
        gap_s: Seconds from the end of the previous step to the beginning; None if there was nothing to run in between.
        cpu_s: CPU seconds of the stepping thread in the model.
        was_cut_off: Whether the step was cut off; its sample then does not show what its work costs.
    """

    emissions: list[Emission]
    failures: list[Output]
    sample: StepSample
    gap_s: float | None
    cpu_s: float
    was_cut_off: bool = False


class _Computed(NamedTuple):
    """A step that was computed and is not booked yet; fields as in ``Step``."""

    batch: StepBatch
    tokens: list[int | None]
    failure: Exception | None
    duration_s: float
    gap_s: float | None
    cpu_s: float


class StepUnderWay(NamedTuple):
    """What the stepping thread does now; read by other threads.

    Attributes:
        number: Rises at the beginning and at the end of each step.
        batch: The batch that is computed; None between two steps.
        thread_id: The operating system's id of the thread.
    """

    number: int
    batch: StepBatch | None
    thread_id: int


class StepLoop:
    """Runs a worker's steps back to back.

    Only the holder of the lock may touch the worker's bookkeeping: the stepping thread between two steps; a helper
    thread for the millisecond in which it books the last step and prepares the next one; the event loop of the shell at
    any other moment. The stepping thread does not hold the lock while the model computes.

    Args:
        on_step: Called after each step, in order, from the stepping thread or its helper.
        on_abort: Called from there with the last outputs of sequences that ``abort_ingress`` has ended.
        max_failures: So many failed steps in a row break the worker.
    """

    def __init__(
        self,
        worker: Worker,
        on_step: Callable[[Step], object],
        on_abort: Callable[[list[Output]], object],
        max_failures: int = 3,
    ) -> None:
        self._worker = worker
        self._on_step = on_step
        self._on_abort = on_abort
        self._orphaned: set[str] = set()
        self._aborted: list[Output] = []
        self._lock = threading.Lock()
        self._max_failures = max_failures
        self._num_failures = 0
        self._count = 0
        self._under_way: StepUnderWay | None = None
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="look-ahead")

    @property
    def locked(self) -> AbstractContextManager[bool]:
        """The lock: while it is held, the worker's bookkeeping may be read and changed."""
        return self._lock

    @property
    def under_way(self) -> StepUnderWay | None:
        """The present step, or the work between two steps; None while nothing runs."""
        return self._under_way

    def abort_ingress(self, ingress_id: str) -> None:
        """Ends an ingress replica's sequences before the next step; the present step still needs its sequences."""
        with self._lock:
            self._orphaned.add(ingress_id)

    def run(self) -> None:
        """Runs steps until nothing can run.

        Raises:
            RankLost: The worker is one of several ranks, and another has gone.
            WorkerBroken: The device is lost, or too many steps in a row have failed.
        """
        try:
            self._run()
        finally:
            self._under_way = None

    def _run(self) -> None:
        self._note(None)
        ended_at: float | None = None
        begun: deque[StepBatch] = deque()
        unbooked: _Computed | None = None
        with self._lock:
            self._begin_steps(begun)
        self._tell_aborted()
        while begun:
            batch = begun.popleft()
            began_at, cpu_s = time.perf_counter(), time.thread_time()
            gap_s = None if ended_at is None else began_at - ended_at
            self._note(batch)
            launch, failure = self._launch(batch)
            if launch is Launch.BEFORE and ended_at is not None:
                began_at, gap_s = ended_at, 0.0  # the device began it then
            tokens: list[int | None] = []
            if failure is None:
                tokens, failure = self._execute(batch, unbooked, launched=launch is not Launch.NOT)
            self._judge(failure)
            ended_at, cpu_s = time.perf_counter(), time.thread_time() - cpu_s
            self._note(None)
            unbooked = _Computed(batch, tokens, failure, ended_at - began_at, gap_s, cpu_s)
            if failure is None and self._goes_on(batch, tokens, begun):
                continue
            with self._lock:
                step = self._book(unbooked)
                self._begin_steps(begun)
            unbooked = None
            # Wakes the event loop, which needs the interpreter: only now, when the next step is about to release it.
            self._on_step(step)
            self._tell_aborted()

    def _goes_on(self, batch: StepBatch, tokens: list[int | None], begun: deque[StepBatch]) -> bool:
        """Begins the next step at once if this one does not change it; this step is booked while the next computes."""
        with self._lock:
            following = None if self._orphaned else self._worker.go_on(batch, tokens)
        if following is not None:
            begun.append(following)
        return following is not None

    def _book(self, done: _Computed) -> Step:
        """Books a step that was computed; the holder of the lock calls it."""
        emissions: list[Emission] = []
        failures: list[Output] = []
        if isinstance(done.failure, IterationCutOff):
            self._worker.cut_off(done.batch, done.duration_s)
        elif done.failure is None:
            emissions = self._worker.commit_step(done.batch, done.tokens, done.duration_s)
        else:
            failures = self._worker.fail_step(done.batch, done.failure)
        was_cut_off = isinstance(done.failure, IterationCutOff)
        sample = step_sample(done.batch, done.duration_s)
        return Step(emissions, failures, sample, done.gap_s, done.cpu_s, was_cut_off)

    def _note(self, batch: StepBatch | None) -> None:
        self._count += 1
        self._under_way = StepUnderWay(self._count, batch, threading.get_native_id())

    def _judge(self, failure: Exception | None) -> None:
        """Raises WorkerBroken if the device is lost or too many steps in a row have failed."""
        if failure is None or isinstance(failure, IterationCutOff):
            self._num_failures = 0
            return
        fault = self._worker.runner.fault(failure)
        if fault is StepFault.LOST:
            raise WorkerBroken(f"the device is lost: {type(failure).__name__}: {failure}") from failure
        self._num_failures += fault is StepFault.UNKNOWN
        if self._num_failures >= self._max_failures:
            raise WorkerBroken(
                f"{self._num_failures} steps in a row have failed, the last with {type(failure).__name__}: {failure}"
            ) from failure

    def _begin_steps(self, begun: deque[StepBatch]) -> None:
        """Begins as many steps as may be under way at once, after ending sequences of dead ingress replicas."""
        while self._orphaned:
            self._aborted += self._worker.abort_ingress(self._orphaned.pop())
        while len(begun) < self._worker.executor.max_in_flight:
            batch = self._worker.begin_step()
            if batch is None:
                return
            begun.append(batch)

    def _tell_aborted(self) -> None:
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            self._on_abort(aborted)

    def _launch(self, batch: StepBatch) -> tuple[Launch, Exception | None]:
        """Launches a step where the device can, and the one after it: this thread books while the device computes."""
        try:
            with self._lock:
                return self._worker.launch(batch), None
        except Exception as error:  # as of ``_compute``
            return Launch.NOT, error

    def _execute(
        self, batch: StepBatch, unbooked: _Computed | None, *, launched: bool
    ) -> tuple[list[int | None], Exception | None]:
        """Computes a step. If it is large or the last one is unbooked, the helper meanwhile books and looks ahead."""
        if unbooked is None and (launched or len(batch.items) < LEAST_TO_LOOK_AHEAD):
            return self._compute(batch)
        helped = self._helper.submit(self._help, batch, unbooked)
        try:
            return self._compute(batch)
        finally:
            helped.result()

    def _help(self, batch: StepBatch, unbooked: _Computed | None) -> None:
        """Books the last step and prepares the next one in the helper's thread, while ``batch`` computes."""
        if unbooked is not None:
            with self._lock:
                step = self._book(unbooked)
            self._on_step(step)
        with self._lock:
            self._worker.look_ahead(batch)

    def _compute(self, batch: StepBatch) -> tuple[list[int | None], Exception | None]:
        try:
            return self._worker.execute(batch), None
        except RankLost:
            raise  # not the fault of these requests, which are resumed in another life
        except Exception as error:  # whatever torch raises ends the step's requests, not the worker
            return [], error
