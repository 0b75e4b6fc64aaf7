"""Static execution on the real engine: what is said is what continuous execution says, only all at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.messages.tokens import DeltaLogprobs, TokenDelta, joined
from farsight.core.request import Request, SamplingParams
from farsight.engine.build import build_worker
from farsight.engine.emission import Output
from farsight.engine.worker import Worker
from tests.unit.engine.conftest import BLOCK_SIZES
from tests.unit.engine.driver import offer, steps
from tests.unit.engine.small_models import SHAPES


@pytest.fixture(params=BLOCK_SIZES)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def make_worker(model_dir: Path, execution: str, backend: str = "torch", max_batch_tokens: int = 48) -> Worker:
    sizes = {"kv_memory": "4MiB", "block_size": BLOCK_SIZES[backend], "max_num_seqs": 16, "num_threads": 1}
    config = EngineConfig(**sizes, max_batch_tokens=max_batch_tokens, backend=backend)  # type: ignore[arg-type]
    preset = "magnus" if execution == "static" else "fcfs"
    scheduler = SchedulerConfig(preset=preset, execution=execution)
    return build_worker(model_dir, "float32", config, "w", scheduler=scheduler)


def random_requests(seed: int = 0) -> list[Request]:
    """Mixed lengths and ends, greedy and drawn, some that want to know log probabilities, one that is resumed."""
    rng = random.Random(seed)
    options: list[dict[str, object]] = [
        {},
        {"benchmark_len": 3},
        {"stop": ("a", "e")},
        {"ignore_eos": True},
        {"logprobs": 3},
        {"logprobs": 0, "prompt_logprobs": True},
        {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.2},
        {"stop_token_ids": tuple(range(100, 200))},
        {"stop": ("zz", "the"), "min_tokens": 4, "logprobs": 1},
    ]
    requests = []
    for i, option in enumerate(options):
        prompt = tuple(rng.randrange(3, 300) for _ in range(rng.choice([1, 4, 17, 30])))
        sampling = SamplingParams(rng.randint(4, 20), **option)  # type: ignore[arg-type]
        requests.append(Request(f"r{i}", 0, f"ingress-{i % 2}", prompt, sampling))
    requests.append(Request("resumed", 2, "ingress-0", (5, 6, 7), SamplingParams(9, ignore_eos=True), (8, 9)))
    return requests


def told(outputs: Sequence[Output]) -> dict[str, TokenDelta]:
    """By request all that its client hears, as one delta."""
    deltas: dict[str, list[TokenDelta]] = {}
    for output in outputs:
        deltas.setdefault(output.delta.request_id, []).append(output.delta)
    return {request_id: joined(each) for request_id, each in deltas.items()}


def about(delta: TokenDelta) -> TokenDelta:
    """Equal to each delta whose log probabilities differ by no more than the order in which a batch is summed up."""
    if delta.logprobs is None:
        return delta
    parts = (
        tuple((ids, cast(tuple[float, ...], pytest.approx(values, abs=1e-4))) for ids, values in part)
        for part in (delta.logprobs.output, delta.logprobs.prompt)
    )
    fields = {name: getattr(delta, name) for name in TokenDelta.__slots__}
    return TokenDelta(**(fields | {"logprobs": DeltaLogprobs(*parts)}))


def continuous(model_dir: Path, requests: Sequence[Request], backend: str = "torch") -> dict[str, TokenDelta]:
    worker = make_worker(model_dir, "ragged", backend)
    offer(worker, requests)
    answers = told([output for outputs in steps(worker) for output in outputs])
    return {request_id: about(delta) for request_id, delta in answers.items()}


def test_pads_are_computed(tiny_model_dir: Path) -> None:
    worker = make_worker(tiny_model_dir, "static")
    keys = worker.runner.pool.keys[0]  # type: ignore[attr-defined]
    keys.fill_(float("nan"))
    offer(worker, [Request(name, 0, "", (5,) * num, SamplingParams(3)) for name, num in (("a", 2), ("b", 9))])
    batch = worker.begin_step()
    assert batch is not None
    worker.execute(batch)
    (pad,) = batch.padding.items
    slots = [pad.blocks[position // 4] * 4 + position % 4 for position in range(9)]
    assert (pad.start, pad.num_tokens) == (2, 7)
    assert bool(keys[slots].isfinite().all())


@pytest.mark.parametrize("shape", SHAPES)
def test_it_says_what_continuous_execution_says(shape: str, model_dir: Callable[[str], Path], backend: str) -> None:
    requests = random_requests()
    expected = continuous(model_dir(shape), requests, backend)
    worker = make_worker(model_dir(shape), "static", backend)
    for cache in (*worker.runner.pool.keys, *worker.runner.pool.values):  # type: ignore[attr-defined]
        cache.fill_(float("nan"))
    offer(worker, requests)
    outputs = steps(worker)
    assert [bool(each) for each in outputs] == [False] * (len(outputs) - 1) + [True], "together"
    assert len(outputs[-1]) == len(requests), "each as one delta"
    assert told(outputs[-1]) == expected
    addresses = {output.delta.request_id: output.ingress_id for output in outputs[-1]}
    assert addresses == {request.request_id: request.ingress_id for request in requests}
    blocks = worker.executor.blocks
    assert blocks.num_free == blocks.num_blocks


def test_an_abort_changes_nothing_for_the_others(tiny_model_dir: Path) -> None:
    requests = random_requests()
    expected = continuous(tiny_model_dir, requests)
    worker = make_worker(tiny_model_dir, "static")
    offer(worker, requests)
    for _ in range(9):
        batch = worker.begin_step()
        assert batch is not None
        assert worker.finish_step(batch, worker.execute(batch)) == []
    stayed = [each for each in requests if each.request_id not in ("r0", "r5")]
    offer(worker, stayed)
    answers = told([output for outputs in steps(worker) for output in outputs])
    assert answers == {each.request_id: expected[each.request_id] for each in stayed}


def half_done(model_dir: Path) -> Worker:
    """A worker in the middle of a batch: a has its whole output, b has not."""
    worker = make_worker(model_dir, "static")
    sampling = [SamplingParams(num, ignore_eos=True) for num in (2, 9)]
    offer(worker, [Request(name, 0, name, (5, 6), each) for name, each in zip("ab", sampling, strict=True)])
    for _ in range(3):
        batch = worker.begin_step()
        assert batch is not None
        assert worker.finish_step(batch, worker.execute(batch)) == []
    return worker


def ends(outputs: Sequence[Output]) -> dict[str, list[tuple[int, int, str | None]]]:
    """By request of each delta its first index, its length and the finish reason."""
    found: dict[str, list[tuple[int, int, str | None]]] = {}
    for output in outputs:
        delta = output.delta
        found.setdefault(delta.request_id, []).append((delta.start, len(delta.token_ids), delta.finish_reason))
    return found


def test_a_step_that_raises_returns_what_is_complete_and_ends_the_rest_without_a_gap(tiny_model_dir: Path) -> None:
    worker = half_done(tiny_model_dir)
    batch = worker.begin_step()
    assert batch is not None
    outputs = worker.fail_step(batch, RuntimeError("device on fire"))
    assert ends(outputs) == {"a": [(0, 2, "length")], "b": [(0, 3, None), (3, 0, "error")]}
    worker.check_integrity()
    assert worker.begin_step() is None
    assert worker.executor.blocks.num_free == worker.executor.blocks.num_blocks


def test_a_step_of_nothing_but_pads_that_raises_ends_those_that_they_were_for(tiny_model_dir: Path) -> None:
    worker = make_worker(tiny_model_dir, "static", max_batch_tokens=8)
    sampling = SamplingParams(9, ignore_eos=True)
    offer(worker, [Request(name, 0, name, (5,) * num, sampling) for name, num in (("a", 2), ("b", 20))])
    first = worker.begin_step()
    assert first is not None
    assert worker.finish_step(first, worker.execute(first)) == []
    pads = worker.begin_step()
    assert pads is not None and not pads.items
    assert ends(worker.fail_step(pads, RuntimeError("device on fire"))) == {"a": [(0, 1, None), (1, 0, "error")]}
    worker.check_integrity()
    (outputs,) = filter(None, steps(worker))
    assert ends(outputs) == {"b": [(0, 9, "length")]}


def test_a_silent_ingress_loses_its_own_requests_only(tiny_model_dir: Path) -> None:
    worker = half_done(tiny_model_dir)
    assert ends(worker.abort_ingress("b")) == {"b": [(0, 3, None), (3, 0, "abort")]}
    assert [ends(outputs) for outputs in steps(worker)] == [{"a": [(0, 2, "length")]}]
    worker.check_integrity()
