"""Runs steps of given shapes on a worker's model, without Ray, and fits the profile to their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from farsight.core.messages.step_times import StepSample
from farsight.core.request import Request, SamplingParams
from farsight.engine.sequence import Sequence as TokenSequence
from farsight.engine.steps.model_runner import ModelRunner
from farsight.estimator.profile_file import HeldBackErrors, ProfiledMachine, ProfiledRange, ProfileFile
from farsight.estimator.step_profile import StepProfile, StepShape
from farsight.kvcache import StepBatch, StepItem
from farsight.kvcache.step_batch import step_sample

HELD_BACK_EVERY = 3
"""One round in this many is held back from the fit to measure its error."""

NUM_REPEATS = 3
"""Repetitions of a step that only decodes ..."""

REPEAT_BELOW_S = 0.05
"""... and takes less than this, in seconds."""

_SHORTEST_S = 1e-9
"""Least base time of a step in seconds, even if other prices explain all of a measurement."""

_FIRST_TOKEN_ID = 3
_ENDLESS = 10**9
"""A window in which no step is discounted: all steps of a measurement count alike."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step.

    Attributes:
        kind: prefill, decode or mixed.
        sample: With wall time, as a live worker measures it.
        cpu_s: CPU time of this process.
    """

    kind: str
    round: int
    sample: StepSample
    cpu_s: float


class StepBench:
    """Runs steps of given shapes on a model runner. The values in the KV do not affect their times."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        rng = np.random.default_rng(0)
        ids = rng.integers(_FIRST_TOKEN_ID, runner.config.vocab_size, runner.max_model_len)
        self._token_ids: list[int] = ids.tolist()
        # Blocks scattered as in a used pool, and written once, because reads of untouched memory are free.
        self._blocks: list[int] = rng.permutation(runner.pool.num_slots // runner.pool.block_size).tolist()
        self._num_cleared = 0

    def run(self, shape: StepShape) -> tuple[StepSample, float]:
        """A step of that shape: its sample with wall time, and the CPU time of this process in seconds.

        A live step that only decodes follows one of the same sequences, whose KV is still in the caches. So it is run
        again and the median of ``NUM_REPEATS`` counts, unless it takes so long that caches matter no more.
        """
        batch, sequences = self._make(shape)
        first = self._time(batch, sequences)
        if shape.chunks or first[0] > REPEAT_BELOW_S:
            duration_s, cpu_s = first
        else:
            repeats = sorted(self._time(batch, sequences) for _ in range(NUM_REPEATS))
            duration_s, cpu_s = repeats[NUM_REPEATS // 2]
        return step_sample(batch, duration_s), cpu_s

    def _time(self, batch: StepBatch, sequences: dict[str, TokenSequence]) -> tuple[float, float]:
        """Wall time and CPU time of one execution."""
        began_at, cpu_s = time.perf_counter(), time.process_time()
        self._runner.execute(batch, sequences)
        return time.perf_counter() - began_at, time.process_time() - cpu_s

    def _make(self, shape: StepShape) -> tuple[StepBatch, dict[str, TokenSequence]]:
        parts = [*shape.chunks, *((context, 1) for context in shape.contexts)]
        items, sequences, taken = [], {}, 0
        for i, (start, num_tokens) in enumerate(parts):
            name, end = f"s{i}", start + num_tokens
            num_blocks = -(-end // self._runner.pool.block_size)
            items.append(StepItem(name, start, num_tokens, True, self._blocks[taken : taken + num_blocks]))
            request = Request(name, 0, "", tuple(self._token_ids[:end]), SamplingParams(1))
            sequences[name] = TokenSequence.of(request)
            taken += num_blocks
        if taken > self._num_cleared:
            untouched = self._blocks[self._num_cleared : taken]
            self._runner.pool.clear_blocks(torch.tensor(untouched, dtype=torch.int64))
            self._num_cleared = taken
        return StepBatch(tuple(items)), sequences


def measure(
    bench: StepBench, grid: Sequence[StepShape], rounds: int, progress: Callable[[int], object] | None = None
) -> list[MeasuredStep]:
    """Measures every shape once per round, each round in another order, so that a disturbance affects all shapes alike.

    A warm-up round is not counted, since first steps are slower.
    """
    for shape in grid:
        bench.run(shape)
    steps = []
    for number in range(rounds):
        for index in np.random.default_rng(number).permutation(len(grid)).tolist():
            shape = grid[index]
            sample, cpu_s = bench.run(shape)
            kind = "decode" if not shape.chunks else "mixed" if shape.contexts else "prefill"
            steps.append(MeasuredStep(kind, number, sample, cpu_s))
            if progress is not None:
                progress(len(steps))
    return steps


def is_held_back(step: MeasuredStep) -> bool:
    """Whether the round is held back from the fit to measure its error."""
    return step.round % HELD_BACK_EVERY == HELD_BACK_EVERY - 1


def num_fitted(rounds: int) -> int:
    """The number of rounds that are not held back."""
    return rounds - rounds // HELD_BACK_EVERY


def fit_steps(samples: Sequence[StepSample]) -> StepProfile:
    """The profile of a whole measurement."""
    learned = StepProfile(window=_ENDLESS)
    learned.observe(samples)
    return learned


def relative_errors(learned: StepProfile, samples: Sequence[StepSample]) -> list[float]:
    """|predicted - measured| / measured of each step."""
    errors = []
    for each in samples:
        work = each.prefill_tokens, each.decode_seqs, each.context_tokens, each.prefill_pairs
        predicted_s = learned.step_time_s(*work)
        assert predicted_s is not None, "there are samples enough"
        errors.append(abs(predicted_s - each.duration_s) / each.duration_s)
    return errors


def fit(steps: Sequence[MeasuredStep], machine: ProfiledMachine, kv_bytes: int) -> ProfileFile:
    """The profile file: prices fitted to most rounds, errors measured on the rounds held back."""
    learned = fit_steps([step.sample for step in steps if not is_held_back(step)])
    errors = relative_errors(learned, [step.sample for step in steps if is_held_back(step)])
    base_s, prefill_token_s, decode_seq_s, context_token_s, prefill_pair_s = learned.coefficients()
    samples = [step.sample for step in steps]
    return ProfileFile(
        base_s=max(base_s, _SHORTEST_S),
        prefill_token_s=prefill_token_s,
        decode_seq_s=decode_seq_s,
        context_token_s=context_token_s,
        prefill_pair_s=prefill_pair_s,
        kv_bytes=kv_bytes,
        machine=machine,
        range=ProfiledRange(
            prefill_tokens=max(each.prefill_tokens for each in samples),
            decode_seqs=max(each.decode_seqs for each in samples),
            context_tokens=max(each.context_tokens for each in samples),
            prefill_pairs=max(each.prefill_pairs for each in samples),
        ),
        error=HeldBackErrors(float(np.median(errors)), float(np.quantile(errors, 0.9)), len(errors)),
    )
