"""A request that no token can be chosen for ends alone, in the whole engine: its neighbours answer as without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import InvalidValueError
from farsight.core.messages.plans import Plan, Slot
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Fault, Request, SamplingParams
from farsight.engine.build import build_worker
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.engine import Engine
from farsight.engine.worker import Worker
from tests.unit.engine.conftest import BLOCK_SIZES, POISON
from tests.unit.engine.driver import offer, steps

Asked = tuple[list[int], SamplingParams]
"""A prompt and how to go on."""


def engine_config(backend: str, kv_memory: str = "4MiB") -> EngineConfig:
    return EngineConfig(
        kv_memory=kv_memory, block_size=BLOCK_SIZES[backend], num_threads=1, backend=backend, max_batch_tokens=32
    )


@cache
def shared_engine(model_dir: Path, backend: str, kv_memory: str = "4MiB") -> Engine:
    return Engine(model_dir, dtype="float32", engine=engine_config(backend, kv_memory))


@cache
def static_worker(model_dir: Path, backend: str) -> Worker:
    scheduler = SchedulerConfig(preset="magnus", execution="static")
    return build_worker(model_dir, "float32", engine_config(backend), "w", scheduler=scheduler)


def run(engine: Engine, asked: list[Asked]) -> list[list[TokenDelta]]:
    """The deltas of each."""
    ids = [engine.submit(prompt, sampling) for prompt, sampling in asked]
    deltas = []
    while not engine.idle:
        deltas += engine.step()
        engine.check_integrity()
    return by_request(engine.worker, ids, deltas)


def run_batch(worker: Worker, asked: list[Asked]) -> list[list[TokenDelta]]:
    """The same of one static batch."""
    requests = [Request(f"r{i}", 0, "x", tuple(prompt), sampling) for i, (prompt, sampling) in enumerate(asked)]
    offer(worker, ())  # the ends before are known: names are free
    assert steps(worker) == []
    offer(worker, requests)
    deltas = [output.delta for outputs in steps(worker) for output in outputs]
    return by_request(worker, [each.request_id for each in requests], deltas)


def by_request(worker: Worker, ids: list[str], deltas: list[TokenDelta]) -> list[list[TokenDelta]]:
    """Each has one end, after which nothing comes, and the memory of all is free."""
    blocks = worker.executor.blocks
    assert blocks.num_free == blocks.num_blocks
    found = [[delta for delta in deltas if delta.request_id == request_id] for request_id in ids]
    for each in found:
        assert [delta.finish_reason is None for delta in each] == [True] * (len(each) - 1) + [False]
    return found


def tokens_of(deltas: list[TokenDelta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def logged_tokens(deltas: list[TokenDelta]) -> list[bool]:
    """For each token whether log probabilities came with it: a guessed token comes in the delta of the one before."""
    return [delta.logprobs is not None for delta in deltas for _ in delta.token_ids]


Runs = Callable[[list[Asked]], list[list[TokenDelta]]]

MODES: dict[str, Callable[[Path], Runs]] = {
    "torch": lambda model: functools.partial(run, shared_engine(model, "torch")),
    "native": lambda model: functools.partial(run, shared_engine(model, "native")),
    "short of blocks": lambda model: functools.partial(run, shared_engine(model, "torch", "24KiB")),
    "static torch": lambda model: functools.partial(run_batch, static_worker(model, "torch")),
    "static native": lambda model: functools.partial(run_batch, static_worker(model, "native")),
}


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25)
@given(data=st.data())
def test_hostile_requests_end_alone(broken_dir: Path, mode: str, data: st.DataObject) -> None:
    runs = MODES[mode](broken_dir)
    vocabulary = tuple(range(load_model_config(broken_dir).vocab_size))
    prompts = st.lists(st.integers(3, 299), min_size=1, max_size=9)
    sampling = st.builds(
        SamplingParams,
        st.integers(1, 12),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 9),
        logprobs=st.sampled_from([None, 2]),
        ignore_eos=st.just(True),
    )
    innocent = data.draw(st.lists(st.tuples(prompts, sampling), min_size=1, max_size=4))
    ways: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 1.0]), "logprobs": st.sampled_from([None, 10**6])}
    )
    hostile: list[Asked] = []
    faults = []
    for way in data.draw(st.lists(ways, min_size=1, max_size=3)):
        if data.draw(st.booleans()):
            forbidding = SamplingParams(9, min_tokens=data.draw(st.integers(1, 9)), stop_token_ids=vocabulary, **way)
            hostile.append((data.draw(prompts), forbidding))
            faults.append(Fault.REQUEST)
        else:
            hostile.append(([*data.draw(prompts), POISON], SamplingParams(9, **way)))
            faults.append(Fault.MODEL)
    alone = runs(innocent)
    place = data.draw(st.integers(0, len(innocent)))
    together = runs([*innocent[:place], *hostile, *innocent[place:]])
    ended = together[place : place + len(hostile)]
    del together[place : place + len(hostile)]
    for one, other in zip(alone, together, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert "".join(delta.text for delta in one) == "".join(delta.text for delta in other)
        assert logged_tokens(one) == logged_tokens(other)
        assert one[-1].finish_reason == other[-1].finish_reason
    for deltas, fault in zip(ended, faults, strict=True):
        assert [delta.token_ids for delta in deltas] == [()]
        assert (deltas[0].finish_reason, deltas[0].fault) == ("error", fault)
        assert "output token 0 cannot be chosen" in (deltas[0].error or "")


def poison_after(worker: Worker, request_id: str, num_tokens: int) -> Callable[[], None]:
    """Called between steps: makes the token before the next one POISON once there are so many."""

    def poison() -> None:
        sequence = worker._sequences.get(request_id)
        if sequence is not None and sequence.output_len == num_tokens:
            sequence.token_ids[-1] = POISON

    return poison


@pytest.mark.parametrize(("execution", "backend"), [("ragged", "torch"), ("static", "torch"), ("static", "native")])
def test_what_came_before_the_failure_is_shown_before_it(broken_dir: Path, execution: str, backend: str) -> None:
    """In a static batch the failed member leaves at once, and the others return together as ever."""
    preset = "magnus" if execution == "static" else "fcfs"
    scheduler = SchedulerConfig(preset=preset, execution=execution)
    worker = build_worker(broken_dir, "float32", engine_config(backend), "w", scheduler=scheduler)
    requests = [
        Request("bad", 0, "x", (5, 6), SamplingParams(9, ignore_eos=True)),
        Request("ok", 0, "x", (7, 8, 9), SamplingParams(6, ignore_eos=True)),
        Request("resumed", 3, "x", (7, 8), SamplingParams(6, ignore_eos=True), (9, POISON)),
    ]
    offer(worker, requests)
    poison = poison_after(worker, "bad", 3)
    told: dict[str, list[TokenDelta]] = {"bad": [], "ok": [], "resumed": []}
    while (batch := worker.begin_step()) is not None:
        for output in worker.finish_step(batch, worker.execute(batch)):
            told[output.delta.request_id].append(output.delta)
        worker.check_integrity()
        poison()
    *shown, last = told["bad"]
    assert len(tokens_of(shown)) == 3 and last.start == 3
    assert (last.finish_reason, last.fault, last.token_ids, last.text) == ("error", Fault.MODEL, (), "")
    assert "output token 3 cannot be chosen: the model's logits hold NaN" in (last.error or "")
    [resumed] = told["resumed"]
    assert (resumed.attempt, resumed.start, resumed.finish_reason) == (3, 2, "error"), "it ends, wherever it is resumed"
    assert len(tokens_of(told["ok"])) == 6 and told["ok"][-1].finish_reason == "length"
    assert {end.request_id for end in worker.executor.report().finished} == set(told)
    slots = tuple(Slot(r.request_id, r.attempt, 99, 99, False, 0, r) for r in requests)
    worker.offer_plan(Plan("w", 0, 2, 0, 0, slots))
    assert worker.begin_step() is None, "a plan that has not heard of the ends starts nothing again"


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([5, 10**6], {}, "prompt[1]"),
        ([-1], {}, "prompt[0]"),
        ([5], {"stop_token_ids": (4, 10**6)}, "stop_token_ids[1]"),
        ([5], {"stop_token_ids": (-1,)}, "stop_token_ids[0]"),
        ([5], {"logit_bias": ((10**6, 1.0),)}, "logit_bias"),
    ],
)
def test_tokens_that_the_model_lacks_are_refused(
    tiny_model_dir: Path, prompt: list[int], options: dict[str, Any], field: str
) -> None:
    engine = shared_engine(tiny_model_dir, "torch")
    with pytest.raises(InvalidValueError) as caught:
        engine.submit(prompt, SamplingParams(3, **options))
    assert caught.value.field == field and engine.idle
