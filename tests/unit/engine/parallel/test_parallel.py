"""Several ranks as real processes (gloo, float32) against one: the same tokens, whatever happens to the KV."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import FarsightError, RankLost
from farsight.core.messages.tokens import TokenLogprobs
from farsight.core.request import Fault, Request, SamplingParams, SequenceStatus
from farsight.engine import Engine
from farsight.engine.build import build_worker
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.parallel import device
from farsight.engine.parallel.driver import ParallelRunner
from farsight.engine.parallel.links import RANK_MODULE, LocalRanks
from farsight.engine.parallel.mesh import Mesh, Part
from farsight.engine.sequence import Sequence
from farsight.kvcache import StepBatch
from tests.unit.engine.driver import offer, steps
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.parallel import short_of_memory
from tests.unit.engine.parallel.short_of_memory import Shortage
from tests.unit.engine.small_models import SHAPES, assert_greedy, load_reference, save_model
from tests.unit.engine.test_engine import ROOMY, TIGHT_BLOCKS, families, greedy, random_prompts, with_random_moves

pytestmark = pytest.mark.timeout(900)  # as many processes as ranks, each of which loads torch

TORCH = dataclasses.replace(ROOMY, backend="torch")


@pytest.fixture(autouse=True)
def _one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def local_ranks(mesh: Mesh, module: str = RANK_MODULE) -> Iterator[LocalRanks]:
    ranks = LocalRanks(mesh, module)
    try:
        yield ranks
    finally:
        ranks.close()


def most_under_way(engine: Engine) -> Callable[[], int]:
    """How many steps have been under way at once, from now on."""
    runner, count, most = engine.worker.runner, 0, 0
    begin, execute = runner.begin, runner.execute

    def beginning(batch: StepBatch, sequences: dict[str, Sequence]) -> None:
        nonlocal count, most
        count += 1
        most = max(most, count)
        begin(batch, sequences)

    def executing(batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        nonlocal count
        count -= 1
        return execute(batch, sequences)

    runner.begin, runner.execute = beginning, executing  # type: ignore[method-assign]
    return lambda: most


def live(
    engine: Engine, prompts: list[list[int]], sampling: list[SamplingParams], rng: random.Random
) -> list[list[int]]:
    """Runs them all, with others among them that are aborted at random moments."""
    ids = [engine.submit(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    doomed: list[str] = []
    while not engine.idle:
        if rng.random() < 0.1 and any(len(outputs[name]) < 5 for name in ids):
            doomed.append(engine.submit(rng.choice(prompts), greedy(30)))
        if doomed and rng.random() < 0.2:
            engine.abort(doomed.pop(rng.randrange(len(doomed))))
        for delta in engine.step():
            output = outputs.setdefault(delta.request_id, [])
            assert delta.start == len(output), "a token is missing or repeated"
            output += delta.token_ids
        engine.check_integrity()
    return [outputs[request_id] for request_id in ids]


@pytest.mark.parametrize(
    ("shape", "tensor", "pipeline"),
    [
        pytest.param("qwen2", 2, 1, marks=pytest.mark.nightly),  # biases
        ("mqa", 2, 1),  # both columns have the same keys and values
        ("gqa", 1, 2),
        # three layers in two stages, sliding windows, norms of heads, tied embeddings
        pytest.param("qwen3", 2, 2, marks=pytest.mark.nightly),
        pytest.param("opt", 2, 2, marks=pytest.mark.nightly),  # learned positions, biases that must be added once
        pytest.param("qwen3 moe", 2, 1, marks=pytest.mark.nightly),  # four experts on one column, five on the other
    ],
)
def test_ranks_give_the_tokens_of_one_rank(
    model_dir: Callable[[str], Path], tmp_path: Path, shape: str, tensor: int, pipeline: int
) -> None:
    """In a pool that is too small, with a host pool and prefixes in common; moves and aborts at random."""
    is_mixture = shape not in SHAPES
    directory = save_model(tmp_path, **FAMILIES[shape]) if is_mixture else model_dir(shape)
    mesh = Mesh(tensor, pipeline, whole_experts=is_mixture)
    prompts, rng = families(12, seed=13), random.Random(14)
    sampling = [greedy(rng.randint(5, 20)) for _ in prompts]
    expected = Engine(directory, engine=TORCH).generate(prompts, sampling)
    with local_ranks(mesh) as ranks:
        engine, policy = with_random_moves(directory, on_ranks(directory, mesh), rng, ranks.ranks)
        under_way = most_under_way(engine)
        moved: set[SequenceStatus] = set()
        took_done = engine.worker.executor.complete_copy

        def watching(copy_id: int, *, failed: bool = False) -> None:
            took_done(copy_id, failed=failed)
            assert not failed
            moved.update(each.status for each in engine.worker.executor.report().progress)

        engine.worker.executor.complete_copy = watching  # type: ignore[method-assign]
        outputs = live(engine, prompts, sampling, rng)
    for prompt, output, completion in zip(prompts, outputs, expected, strict=True):
        if tuple(output) != completion.token_ids:  # only where the reference cannot tell two tokens apart
            assert len(output) == len(completion.token_ids)
            assert_greedy(load_reference(directory), prompt, output)
    executor = engine.worker.executor
    assert policy.num_events > 10
    assert SequenceStatus.OFFLOADED in moved
    assert executor.prefix_hits > 0
    assert under_way() == pipeline
    assert executor.blocks.num_free == executor.blocks.num_blocks
    assert executor.host is not None
    assert executor.host.num_free == executor.host.num_blocks


@pytest.mark.nightly
@pytest.mark.parametrize(("shape", "tensor", "pipeline"), [("mqa", 2, 1), ("gqa", 2, 2)])
def test_steps_that_ranks_have_no_memory_for_are_computed_in_parts(
    model_dir: Callable[[str], Path],
    shape: str,
    tensor: int,
    pipeline: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each rank fails on its own, before, between and behind what it exchanges with the others; KV moves beside it."""
    directory = model_dir(shape)
    prompts, rng = families(8, seed=13), random.Random(14)
    sampling = [greedy(rng.randint(5, 12)) for _ in prompts]
    expected = Engine(directory, engine=TORCH).generate(prompts, sampling)
    with local_ranks(Mesh(tensor, pipeline), short_of_memory.__name__) as ranks:
        engine, _ = with_random_moves(directory, on_ranks(directory, ranks.ranks.mesh), rng, ranks.ranks)
        shortage = Shortage(seed=0, share=0.2, patch=monkeypatch.setattr)
        runner = engine.worker.runner
        assert isinstance(runner, ParallelRunner)
        execute = runner.execute

        def executing(batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
            if rng.random() < 0.3:
                runner.careful.max_tokens = None  # there is room again: later steps are begun whole
            return execute(batch, sequences)

        runner.execute = executing  # type: ignore[assignment]
        failures = [f"rank {rank}: OutOfMemoryError" for rank in range(tensor * pipeline)]
        with caplog.at_level(logging.WARNING):
            # What steps there are depends on when copies end: until each rank has failed in one, and not only rank 0.
            while not (runner.num_ooms > shortage.num_failed > 0 and all(each in caplog.text for each in failures)):
                outputs = live(engine, prompts, sampling, rng)
                for prompt, output, completion in zip(prompts, outputs, expected, strict=True):
                    if tuple(output) != completion.token_ids:
                        assert len(output) == len(completion.token_ids)
                        assert_greedy(load_reference(directory), prompt, output)
        _refuse_one_and_go_on(engine, shortage, prompts[0], expected[0].token_ids)
    executor = engine.worker.executor
    assert executor.blocks.num_free == executor.blocks.num_blocks


def _refuse_one_and_go_on(engine: Engine, shortage: Shortage, prompt: list[int], expected: tuple[int, ...]) -> None:
    """Where not even one token finds room, or a step cannot be computed at all, it fails; the ranks are in step."""
    for error, seen in ((torch.OutOfMemoryError, torch.OutOfMemoryError), (ValueError, RuntimeError)):
        shortage.least, shortage.share, shortage.error = 1, 1.0, error
        engine.submit(prompt, greedy(len(expected)))
        with pytest.raises(seen, match=f"rank 0: {error.__name__}"):
            while not engine.idle:  # the policy may move it before its first step
                engine.step()
        shortage.share = 0.0
        for progress in engine.worker.executor.report().progress:
            engine.abort(progress.request_id)
        assert engine.generate([prompt], greedy(len(expected)))[0].token_ids == expected


def on_ranks(directory: Path, mesh: Mesh) -> EngineConfig:
    """A pool as tight as ``tight``, on every rank."""
    whole = load_model_config(directory)
    parts = [Part(whole, mesh, rank).config for rank in range(mesh.size)]
    rank_bytes = max(part.kv_bytes_per_token(torch.float32) for part in parts) * 4
    pools: dict[str, Any] = {"kv_memory": str(rank_bytes * TIGHT_BLOCKS), "host_kv_memory": str(rank_bytes * 20)}
    return dataclasses.replace(TORCH, **pools)


@pytest.mark.nightly
def test_sampling_and_log_probabilities_are_those_of_one_rank(model_dir: Callable[[str], Path]) -> None:
    directory = model_dir("gqa")
    prompts = random_prompts(6)
    options = {"temperature": 0.9, "logprobs": 2, "repetition_penalty": 1.2}
    sampling = [greedy(8, seed=i, prompt_logprobs=i % 2 == 0, **options) for i in range(6)]
    every_token = tuple(range(load_model_config(directory).vocab_size))

    def run(engine: Engine) -> dict[str, list[TokenLogprobs]]:
        found: dict[str, list[TokenLogprobs]] = {}
        for prompt, params in zip(prompts, sampling, strict=True):
            found[engine.submit(prompt, params)] = []
        hostile = engine.submit(prompts[0], greedy(8, temperature=1.0, min_tokens=1, stop_token_ids=every_token))
        faults = []
        while not engine.idle:
            for delta in engine.step():
                if delta.request_id == hostile:
                    faults.append(delta.fault)
                    continue
                assert delta.logprobs is not None
                found[delta.request_id] += (*delta.logprobs.prompt, *delta.logprobs.output)
            engine.check_integrity()
        assert faults == [Fault.REQUEST], "it ends alone"
        return found

    expected = run(Engine(directory, engine=TORCH))
    with local_ranks(Mesh(1, 2)) as ranks:
        found = run(Engine(directory, engine=TORCH, ranks=ranks.ranks))
    for name, rows in found.items():
        assert [ids for ids, _ in rows] == [ids for ids, _ in expected[name]]
        for (_, logprobs), (_, others) in zip(rows, expected[name], strict=True):
            assert logprobs == pytest.approx(others, abs=1e-4)


@pytest.mark.nightly
def test_a_batch_in_lockstep_runs_over_ranks(model_dir: Callable[[str], Path]) -> None:
    directory = model_dir("gqa")
    prompts = random_prompts(6)
    expected = Engine(directory, engine=TORCH).generate(prompts, greedy(6))
    requests = [Request(f"r{i}", 0, "", tuple(prompt), greedy(6)) for i, prompt in enumerate(prompts)]
    static = SchedulerConfig(preset="magnus", execution="static")
    with local_ranks(Mesh(1, 2)) as ranks:
        worker = build_worker(directory, "float32", TORCH, "w", scheduler=static, ranks=ranks.ranks)
        offer(worker, requests)
        outputs = [output for each in steps(worker) for output in each]
    found = {output.delta.request_id: output.delta.token_ids for output in outputs}
    assert [found[each.request_id] for each in requests] == [each.token_ids for each in expected]


@pytest.mark.parametrize("idle", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_rank_that_dies_is_missed_at_once(model_dir: Callable[[str], Path], idle: bool) -> None:
    gone = threading.Event()
    with local_ranks(Mesh(1, 2)) as ranks:
        watched = dataclasses.replace(ranks.ranks, on_lost=lambda error: gone.set())
        engine = Engine(model_dir("gqa"), engine=TORCH, ranks=watched)
        if not idle:
            engine.submit([5, 6], greedy(100))
            engine.step()
        ranks.processes[0].kill()
        assert gone.wait(120)
        if not idle:
            with pytest.raises(RankLost):
                for _ in range(100):
                    engine.step()


def test_a_rank_that_cannot_load_says_why(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """The model is on the node of rank 0 only."""
    directory = model_dir("gqa")
    with local_ranks(Mesh(1, 2)) as ranks:
        moved = tmp_path / "model"
        moved.symlink_to(directory)
        tell = device._tell

        def forget(links: object, message: object) -> None:
            moved.unlink(missing_ok=True)
            tell(links, message)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch, pytest.raises(FarsightError, match=r"rank 1.*config\.json"):
            patch.setattr(device, "_tell", forget)
            patch.setattr(device, "load_shard", lambda *args: None)
            Engine(moved, engine=TORCH, ranks=ranks.ranks)
