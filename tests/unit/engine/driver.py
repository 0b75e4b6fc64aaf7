"""Hand-made steps, what an engine does with a runner, with nothing clever in between; and an engine run to its end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.messages.plans import Plan, Slot
from farsight.core.request import Request, SamplingParams, SequenceStatus
from farsight.engine.emission import Output
from farsight.engine.engine import Engine
from farsight.engine.sequence import Sequence
from farsight.engine.steps.model_runner import ModelRunner
from farsight.engine.worker import Worker
from farsight.kvcache import StepBatch, StepItem


class Driver:
    """Gives sequences blocks at random places of the pool and computes what it is told to."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.sequences: dict[str, Sequence] = {}
        self.computed: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._free = list(range(runner.pool.num_slots // runner.pool.block_size))
        random.Random(seed).shuffle(self._free)

    def add(self, name: str, prompt_ids: list[int], **sampling: Any) -> None:
        request = Request(name, 1, "ingress", tuple(prompt_ids), SamplingParams(**{"max_new_tokens": 100} | sampling))
        self.sequences[name] = Sequence.of(request)
        self.computed[name] = 0
        self._tables[name] = []

    def remove(self, name: str) -> None:
        self._free.extend(self._tables.pop(name))
        del self.sequences[name], self.computed[name]

    def batch(self, **num_tokens: int) -> StepBatch:
        """The next ``num_tokens`` tokens of each named sequence."""
        items = []
        for name, count in num_tokens.items():
            start, table = self.computed[name], self._tables[name]
            while len(table) * self.runner.pool.block_size < start + count:
                table.append(self._free.pop())
            samples = start + count == len(self.sequences[name].token_ids)
            items.append(StepItem(name, start, count, samples, table))
        return StepBatch(tuple(items))

    def logits(self, **num_tokens: int) -> list[torch.Tensor | None]:
        batch = self.batch(**num_tokens)
        logits = self.runner.logits(batch, self.sequences)
        self._commit(batch)
        return logits

    def step(self, **num_tokens: int) -> list[int | None]:
        """Computes, and appends what was sampled."""
        batch = self.batch(**num_tokens)
        tokens = self.runner.execute(batch, self.sequences)
        self._commit(batch)
        for item, token in zip(batch.items, tokens, strict=True):
            assert (token is not None) == item.samples
            if token is not None:
                self.sequences[item.request_id].token_ids.append(token)
                self.sequences[item.request_id].num_tokens += 1
        return tokens

    def _commit(self, batch: StepBatch) -> None:
        for item in batch.items:
            self.computed[item.request_id] += item.num_tokens
            self.sequences[item.request_id].computed_len = self.computed[item.request_id]

    def remaining(self, name: str) -> int:
        return len(self.sequences[name].token_ids) - self.computed[name]


def outputs_of(engine: Engine, request_ids: list[str]) -> tuple[list[tuple[int, ...]], set[SequenceStatus]]:
    """Steps until nothing is left to do: the tokens of each request, and what any sequence was between two steps."""
    tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
    seen: set[SequenceStatus] = set()
    while not engine.idle:
        for delta in engine.step():
            assert delta.start == len(tokens[delta.request_id]), "a token is missing or repeated"
            assert delta.error is None
            tokens[delta.request_id] += delta.token_ids
        engine.check_integrity()
        seen.update(each.status for each in engine.worker.executor.report().progress)
    return [tuple(tokens[request_id]) for request_id in request_ids], seen


def offer(worker: Worker, requests: Iterable[Request]) -> None:
    """A plan of these and no others."""
    executor = worker.executor
    slots = [Slot(each.request_id, each.attempt, 999, 999, False, 0, each) for each in requests]
    report_seq = executor.report().report_seq
    worker.offer_plan(Plan("w", executor.lease, executor.plan_seq + 1, report_seq, 0, tuple(slots)))


def steps(worker: Worker) -> list[list[Output]]:
    """The outputs of each step until nothing runs."""
    outputs = []
    while (batch := worker.begin_step()) is not None:
        outputs.append(worker.finish_step(batch, worker.execute(batch)))
        worker.check_integrity()
    return outputs


SMALL = EngineConfig(kv_memory="4MiB", block_size=16, max_num_seqs=8, max_batch_tokens=32, num_threads=1)
PROMPTS = [[3, 7, 11, 200, 41], [150, 4], list(range(20, 60))]


def greedy_answers(path: Path, backend: str = "auto") -> list[tuple[int, ...]]:
    """Twelve tokens behind each of ``PROMPTS``."""
    engine = Engine(path, dtype="float32", engine=dataclasses.replace(SMALL, backend=backend))
    return [each.token_ids for each in engine.generate(PROMPTS, SamplingParams(12, ignore_eos=True))]
