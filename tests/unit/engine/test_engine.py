"""The whole engine without Ray: scheduler, executor, worker and model; what decides who runs decides nothing about
what comes out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from farsight import services
from farsight.core.config.engine import EngineConfig
from farsight.core.config.load import make_config
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.core.messages.kv import KVTraffic
from farsight.core.request import SamplingParams, SequenceStatus
from farsight.engine import Engine, RequestOutput
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.parallel.links import Ranks
from farsight.engine.sequence import Sequence
from farsight.kvcache import StepBatch
from farsight.policies.compose import swaps_kv
from farsight.policies.interfaces import KvMoves, KvPolicy, KvView
from farsight.policies.kv.newest_first import NewestGiveWay
from farsight.policies.presets import PRESETS
from tests.opcodes import num_opcodes
from tests.unit.engine.driver import outputs_of

ROOMY = EngineConfig(kv_memory="4MiB", block_size=4, max_num_seqs=8, max_batch_tokens=32, num_threads=1)
TIGHT_BLOCKS = 26  # of 4 tokens: about two and a half of the sequences below


def tight(model_dir: Path, num_blocks: int = TIGHT_BLOCKS) -> EngineConfig:
    num_bytes = load_model_config(model_dir).kv_bytes_per_token(torch.float32) * 4 * num_blocks
    return EngineConfig(kv_memory=str(num_bytes), block_size=4, max_num_seqs=8, max_batch_tokens=32, num_threads=1)


def greedy(num_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(num_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def random_prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 300) for _ in range(rng.randint(1, 24))] for _ in range(count)]


def first_completion(engine: Engine, prompt: list[int], **options: object) -> RequestOutput:
    return engine.generate([prompt], SamplingParams(**{"max_new_tokens": 40, **options}))[0]  # type: ignore[arg-type]


def test_stop_conditions(tiny_model_dir: Path) -> None:
    engine = Engine(tiny_model_dir, engine=ROOMY)
    prompt = random_prompts(1)[0]
    whole = first_completion(engine, prompt, ignore_eos=True)
    by_id = first_completion(engine, prompt, ignore_eos=True, stop_token_ids=(whole.token_ids[5],))
    end = whole.token_ids.index(whole.token_ids[5])
    assert (by_id.token_ids, by_id.finish_reason) == (whole.token_ids[: end + 1], "stop")
    stop = whole.text[4:7]
    by_text = first_completion(engine, prompt, ignore_eos=True, stop=(stop,))
    assert by_text.text == whole.text[: whole.text.index(stop)]
    assert by_text.finish_reason == "stop"
    assert whole.text.startswith(by_text.text)


def test_eos_ends_a_sequence_and_is_no_text(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """The model's own EOS is made to be a token that it is known to say."""
    prompt = random_prompts(1)[0]
    whole = first_completion(Engine(model_dir("gqa"), engine=ROOMY), prompt, ignore_eos=True)
    directory = tmp_path / "model"
    shutil.copytree(model_dir("gqa"), directory)
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": whole.token_ids[7]}))
    ended = first_completion(Engine(directory, engine=ROOMY), prompt)
    end = whole.token_ids.index(whole.token_ids[7])
    assert (ended.token_ids, ended.finish_reason) == (whole.token_ids[: end + 1], "stop")
    assert whole.text.startswith(ended.text)


def test_a_prompt_of_the_whole_pool_is_served_and_a_larger_one_refused(tiny_model_dir: Path) -> None:
    engine = Engine(tiny_model_dir, engine=tight(tiny_model_dir, num_blocks=10))
    assert engine.worker.ready.pool_limited
    assert engine.worker.ready.max_model_len == 40
    assert len(engine.generate([[5] * 35], greedy(5))[0].token_ids) == 5
    with pytest.raises(InvalidValueError, match=r"max_tokens.*at most 5"):
        engine.submit([5] * 35, greedy(6))


def test_a_shorter_context_limits_sequences_and_the_automatic_pool(tiny_model_dir: Path) -> None:
    config = EngineConfig(block_size=4, max_num_seqs=3, max_model_len=30, num_threads=1)
    ready = Engine(tiny_model_dir, engine=config).worker.ready
    assert (ready.max_model_len, ready.num_blocks, ready.pool_limited) == (30, 24, False)
    with pytest.raises(InvalidValueError, match=r"max_tokens.*at most 5"):
        Engine(tiny_model_dir, engine=config).submit([5] * 25, greedy(6))


def test_settings_that_cannot_work_are_named(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_memory.*room for at least one block"):
        Engine(tiny_model_dir, engine=EngineConfig(kv_memory="10"))
    with pytest.raises(ConfigError, match=r"engine\.max_model_len.*257.*256"):
        Engine(tiny_model_dir, engine=EngineConfig(max_model_len=257))
    with pytest.raises(ConfigError, match=r"scheduler\.preset"):
        Engine(tiny_model_dir, engine=ROOMY, scheduler=SchedulerConfig(preset="lifo"))


def families(count: int, seed: int) -> list[list[int]]:
    """Prompts of which many begin alike."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, 300) for _ in range(30)] for _ in range(3)]
    return [
        rng.choice(stems)[: rng.randint(1, 30)] + [rng.randrange(3, 300) for _ in range(rng.randint(0, 6))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("roomy", [True, False])
def test_the_prefix_cache_changes_no_token(tiny_model_dir: Path, roomy: bool) -> None:
    config = ROOMY if roomy else tight(tiny_model_dir)
    scheduler = SchedulerConfig(watermark=1.0)
    prompts, rng = families(40, seed=8), random.Random(9)
    sampling = [greedy(rng.randint(1, 30), temperature=rng.choice([0.0, 0.8]), seed=i) for i in range(40)]
    without = Engine(tiny_model_dir, engine=dataclasses.replace(config, prefix_cache=False), scheduler=scheduler)
    expected = without.generate(prompts, sampling)
    engine = Engine(tiny_model_dir, engine=config, scheduler=scheduler)
    for _ in range(2):  # the second time all of it is known, as far as there was room
        assert engine.generate(prompts, sampling) == expected
        engine.check_integrity()
    assert without.worker.executor.prefix_hits == 0 < engine.worker.executor.prefix_hits


def test_equal_prompts_are_computed_once_and_the_client_is_told(tiny_model_dir: Path) -> None:
    engine = Engine(tiny_model_dir, engine=ROOMY)
    ids = [engine.submit([7] * 23, greedy(2)) for _ in range(5)]
    num_computed, cached = 0, dict.fromkeys(ids, 0)
    execute = engine.worker.runner.execute

    def counting(batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        nonlocal num_computed
        num_computed += batch.num_tokens
        return execute(batch, sequences)

    engine.worker.runner.execute = counting  # type: ignore[method-assign]
    while not engine.idle:
        for delta in engine.step():
            assert delta.cached_len == 0 or delta.start == 0
            cached[delta.request_id] += delta.cached_len
    assert sorted(cached.values()) == [0, 20, 20, 20, 20]
    assert num_computed == 23 + 4 * 3 + 5, "one decode step each after the prompt"


def with_host(config: EngineConfig, host_blocks: int, blocks: int = TIGHT_BLOCKS) -> EngineConfig:
    return dataclasses.replace(config, host_kv_memory=str(int(config.kv_memory) // blocks * host_blocks))


class RandomMoves(KvPolicy):
    """A KV policy that also offloads, drops and calls back at random moments, more than anybody needs."""

    evicts = swaps = True
    watches = False

    def __init__(self, rng: random.Random) -> None:
        self.num_events = 0
        self._rng = rng
        self._rule = NewestGiveWay(swaps=True)

    def moves(self, view: KvView, now: float) -> KvMoves:
        moves = self._rule.moves(view, now)
        if moves == KvMoves() and self._rng.random() < 0.4:
            moves = self._random(view)
        self.num_events += len(moves.offload) + len(moves.drop) + len(moves.upload)
        return moves

    def _random(self, view: KvView) -> KvMoves:
        resident = [job for job in (*view.idle, *view.running) if job.is_resident]
        victims = [job for job in resident if self._rng.random() < 0.3]
        offloads = self._rng.randint(0, len(victims))
        uploads = [job for job in view.offloaded if self._rng.random() < 0.3 and job.known_len <= view.free]
        return KvMoves(tuple(victims[:offloads]), tuple(victims[offloads:]), tuple(uploads[:1]))

    def start_room(self, view: KvView) -> float:
        return math.inf


def with_random_moves(
    model_dir: Path, config: EngineConfig, rng: random.Random, ranks: Ranks | None = None
) -> tuple[Engine, RandomMoves]:
    """A preemptive order, so that the policy is asked at every report."""
    scheduler = SchedulerConfig(watermark=1.0, order="skip-join-mlfq", kv="swap-newest")
    engine = Engine(model_dir, engine=config, scheduler=scheduler, ranks=ranks)
    policy = RandomMoves(rng)
    engine.scheduler.selector.kv = policy
    return engine, policy


@pytest.mark.parametrize("host_blocks", [4, 60])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_offloaded_sequences_give_the_same_tokens(tiny_model_dir: Path, host_blocks: int, prefix_cache: bool) -> None:
    """Under pressure, and by orders at random moments; with little room on the host some are computed again."""
    config = dataclasses.replace(tight(tiny_model_dir), prefix_cache=prefix_cache)
    prompts = families(30, seed=10)
    sampling = [greedy(30, temperature=0.8, seed=i) for i in range(30)]
    expected = Engine(tiny_model_dir, engine=ROOMY).generate(prompts, sampling)
    engine, _ = with_random_moves(tiny_model_dir, with_host(config, host_blocks), random.Random(11))
    found, seen = outputs_of(engine, [engine.submit(*each) for each in zip(prompts, sampling, strict=True)])
    assert found == [completion.token_ids for completion in expected]
    assert SequenceStatus.OFFLOADED in seen
    executor = engine.worker.executor
    assert executor.host is not None
    assert (executor.blocks.num_free, executor.host.num_free) == (TIGHT_BLOCKS, host_blocks)


@pytest.mark.parametrize("num_events", [2_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_random_events_never_exceed_the_pools(tiny_model_dir: Path, num_events: int) -> None:
    """Aborts, preemptions, offloads and uploads; the pools raise if a block is handed out twice or is lost.

    Nothing is computed: who holds which block does not depend on it.
    """
    rng = random.Random(12)
    engine, policy = with_random_moves(tiny_model_dir, with_host(tight(tiny_model_dir), 20), rng)
    engine.worker.runner.execute = lambda batch, _: [5 if item.samples else None for item in batch.items]  # type: ignore[method-assign, assignment]
    alive: list[str] = []
    num_aborts = 0
    while policy.num_events + num_aborts < num_events:
        while len(alive) < 12:
            prompt = [rng.randrange(3, 300) for _ in range(rng.randint(1, 24))]
            alive.append(engine.submit(prompt, greedy(rng.randint(1, 40))))
        if rng.random() < 0.2:
            num_aborts += 1
            engine.abort(alive.pop(rng.randrange(len(alive))))
        deltas = engine.step()
        assert {delta.request_id for delta in deltas} <= set(alive), "a token of an aborted or ended request"
        ended = {delta.request_id for delta in deltas if delta.finish_reason}
        alive = [request_id for request_id in alive if request_id not in ended]
        engine.check_integrity()
    for request_id in alive:
        engine.abort(request_id)
    for _ in range(50):  # a step with nothing to run waits for a copy
        engine.step()
    executor = engine.worker.executor
    assert executor.host is not None
    assert (executor.blocks.num_free, executor.host.num_free) == (TIGHT_BLOCKS, 20)


def test_text_prompts_are_whole_and_plain(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A truncation and a padding from training do not cut them, and they name no control tokens."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model_dir, directory)
    path = directory / "tokenizer.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        **{"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "</s>"},
    }
    path.write_text(json.dumps(settings), encoding="utf-8")
    engine = Engine(directory, engine=ROOMY)
    special = next(each.content for each in engine.tokenizer.get_added_tokens_decoder().values() if each.special)
    text = "the lazy dog " * 4 + special
    (completion,) = engine.generate([text], greedy(2))
    assert len(completion.prompt_ids) > 8
    assert engine.tokenizer.token_to_id(special) not in completion.prompt_ids
    assert engine.tokenizer.decode(list(completion.prompt_ids), skip_special_tokens=False) == text


LONG_PROMPTS = [[5 + (i * 7 + j) % 50 for j in range(40 + 20 * i)] for i in range(4)]


def served_in_turn(folder: Path, backend: str, mlfq: str) -> tuple[list[tuple[int, ...]], int]:
    """Outputs of four requests that share one place, and how many of their steps were cut off."""
    quanta = {"quantum_s": 1e-6, "quantum_ratio": 16.0, "starve_limit_s": 1e6}
    scheduler = SchedulerConfig(preset="fastserve", mlfq=mlfq, **quanta)  # type: ignore[arg-type]
    engine = Engine(folder, engine=EngineConfig(backend=backend, max_num_seqs=1), scheduler=scheduler)
    order = [engine.submit(prompt, SamplingParams(6, ignore_eos=True)) for prompt in LONG_PROMPTS]
    return outputs_of(engine, order)[0], engine.worker.executor.num_cut_off


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_streams_are_the_same_with_and_without_iterations_that_are_cut_off(backend: str, tiny_model_dir: Path) -> None:
    """The first quantum is a microsecond, so every first iteration is cut off on any machine."""
    whole, none = served_in_turn(tiny_model_dir, backend, "no-preemption")
    cut, num = served_in_turn(tiny_model_dir, backend, "preemption")
    assert cut == whole and all(len(each) == 6 for each in whole)
    assert none == 0 and num >= len(LONG_PROMPTS)


@pytest.mark.parametrize("tables", [{"engine": {"device": "cuda"}}, {"model": {"tensor_parallel": 2}}])
def test_where_no_iteration_can_be_cut_off_it_is_refused(tables: dict[str, dict[str, object]]) -> None:
    make_config({**tables, "scheduler": {"preset": "fastserve", "mlfq": "no-preemption"}})
    with pytest.raises(ConfigError, match=r"scheduler\.mlfq: got 'preemption'.*cpu and emulated"):
        make_config({**tables, "scheduler": {"preset": "fastserve", "mlfq": "preemption"}})
    with pytest.raises(ConfigError, match=r"scheduler\.mlfq.*skip-join, no-preemption, preemption"):
        make_config({"scheduler": {"mlfq": "naive"}})


MODEL = Path(services.__file__).parent / "embedded_model"
COUNTING = [f"Count to {number}: " * (1 + number * 7 % 5 + 30 * (number % 5 == 0)) for number in range(20)]
"""25 to 400 tokens."""

MUCH, LITTLE = "64MiB", "1500KiB"
"""The latter holds 23 blocks of 32 tokens: the long prompts one at a time."""

RECOMPUTING = {"fcfs", "aggressive", "fastserve-recompute", "farsight"}
"""`farsight` stops streams only where memory runs out, and its victim here holds too few tokens to be worth a copy."""

CONTINUOUS = [name for name, preset in PRESETS.items() if preset.mode == "continuous"]


def served_by(preset: str, kv_memory: str) -> tuple[list[tuple[int, ...]], KVTraffic]:
    """Greedy, in fp32, one request every six steps; a clock that no machine's speed moves."""
    config = EngineConfig(kv_memory=kv_memory, max_num_seqs=8)
    # Without ageing, so that under `farsight-mean` long prompts lose their places to short ones and KV moves.
    scheduler = SchedulerConfig(preset=preset, watermark=1.0, gamma=0.0)
    ticks = itertools.count()
    engine = Engine(MODEL, dtype="float32", engine=config, scheduler=scheduler, clock=lambda: 0.005 * next(ticks))
    outputs: dict[str, list[int]] = {}
    prompts = iter(COUNTING)
    for step in itertools.count():
        if step % 6 == 0 and (prompt := next(prompts, None)) is not None:
            outputs[engine.submit(prompt, SamplingParams(48, ignore_eos=True))] = []
        for delta in engine.step():
            assert delta.start == len(outputs[delta.request_id])
            outputs[delta.request_id] += delta.token_ids
        engine.check_integrity()
        if engine.idle and len(outputs) == len(COUNTING):
            break
    executor = engine.worker.executor
    assert executor.blocks.num_free == executor.blocks.num_blocks
    assert (executor.host is not None) == swaps_kv(scheduler), "by default there is a host pool where one is needed"
    return [tuple(tokens) for tokens in outputs.values()], executor.report().traffic


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    tokens, traffic = served_by("fcfs", MUCH)
    assert traffic == KVTraffic()
    return tokens


@pytest.mark.parametrize("preset", CONTINUOUS)
def test_every_preset_gives_the_same_tokens(preset: str, expected: list[tuple[int, ...]]) -> None:
    tokens, traffic = served_by(preset, LITTLE)
    assert tokens == expected
    swaps = swaps_kv(SchedulerConfig(preset=preset)) and preset not in RECOMPUTING
    assert (traffic.offloads > 0) == (traffic.uploads > 0) == swaps
    assert traffic.recomputed_tokens > 0 or preset not in RECOMPUTING


def test_prompts_are_planned_once(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the prompts take four times the work until the first step."""

    class Begun(Exception):
        """The first step is due."""

    def step(self: Engine) -> None:
        raise Begun

    monkeypatch.setattr(Engine, "step", step)
    engine_config = dataclasses.replace(ROOMY, max_num_seqs=400)

    def cost(num: int) -> int:
        engine = Engine(tiny_model_dir, dtype="float32", engine=engine_config)

        def submit() -> None:
            with pytest.raises(Begun):
                engine.generate([[5 + i % 90, 6, 7] for i in range(num)], greedy(1))

        return num_opcodes(submit)

    assert cost(240) < 4.6 * cost(60)
