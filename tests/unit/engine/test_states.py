"""States beside keys and values: the same bits in any company, behind any cut, after any loss; and no step behind the
wrong tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError, IntegrityError
from farsight.core.messages.tokens import DeltaLogprobs
from farsight.core.request import SamplingParams
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.engine import Engine
from farsight.engine.kv_pool import StatePool
from farsight.engine.parallel.mesh import Mesh, check_parallel
from farsight.engine.step_results import IterationCutOff
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import BlockManager, SequenceState, StepItem
from farsight.policies.presets import PRESETS
from tests.unit.engine.driver import Driver, outputs_of
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.small_models import save_model
from tests.unit.engine.test_engine import random_prompts

NAMES = ["lfm2", "qwen3.5"]
"""A convolution, and the delta rule behind one."""

NUM_SEQUENCES = 32
LENGTHS = [*range(1, 25), 33, 40, 47, 31, 16, 17, 64, 65]
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": FAMILIES["lfm2"] | {"hidden_size": 32, "intermediate_size": 32},
    "qwen3.5": FAMILIES["qwen3.5"] | {"hidden_size": 32, "intermediate_size": 32},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(name: str) -> Path:
        return save_model(tmp_path_factory.mktemp("states"), **MODELS[name])

    return make


def runner_of(path: Path, backend: str = "native", **how: Any) -> ModelRunner:
    return ModelRunner.from_dir(path, dtype=torch.float32, num_blocks=200, block_size=16, backend=backend, **how)


def sequences() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in LENGTHS]


def alone(runner: ModelRunner) -> list[Tensor]:
    """The logits behind each sequence, computed in one step of its own."""
    found = []
    for i, tokens in enumerate(sequences()):
        driver = Driver(runner, seed=i)
        driver.add(f"alone {i}", tokens)
        (logits,) = driver.logits(**{f"alone {i}": len(tokens)})
        assert logits is not None
        found.append(logits.clone())
    return found


def together(runner: ModelRunner, seed: int) -> list[Tensor]:
    """The same in steps of any sequences and any of their tokens; some lose what they have and begin again."""
    rng, driver = random.Random(seed), Driver(runner, seed)
    tokens = dict(enumerate(sequences()))
    for i, each in tokens.items():
        driver.add(f"{seed} {i}", each)
    found: dict[int, Tensor] = {}
    losses = 8
    while len(found) < len(tokens):
        left = [i for i in tokens if i not in found]
        taking_part = rng.sample(left, rng.randint(1, len(left)))
        counts = {}
        for i in taking_part:
            name = f"{seed} {i}"
            if losses and driver.computed[name] and rng.random() < 0.05:
                driver.computed[name] = driver.sequences[name].computed_len = 0
                losses -= 1
            counts[name] = rng.choice([1, 2, 3, rng.randint(1, driver.remaining(name)), driver.remaining(name)])
            counts[name] = min(counts[name], driver.remaining(name))
        for name, logits in zip(counts, driver.logits(**counts), strict=True):
            if logits is not None:
                found[int(name.split()[1])] = logits.clone()
    return [found[i] for i in tokens]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "seeds",
    [range(3), *(pytest.param(range(i, i + 40), marks=pytest.mark.nightly) for i in range(3, 323, 40))],
    ids=str,
)
def test_a_sequence_has_the_same_bits_in_any_step(saved: Callable[[str], Path], name: str, seeds: range) -> None:
    """32 sequences a round, each of them a case: by night 20,000 of the two models together."""
    runner = runner_of(saved(name))
    expected = alone(runner)
    for seed in seeds:
        for i, (mine, theirs) in enumerate(zip(together(runner, seed), expected, strict=True)):
            assert torch.equal(mine, theirs), f"round {seed}, sequence {i}"


@pytest.mark.parametrize("name", NAMES)
def test_threads_change_no_bit(saved: Callable[[str], Path], name: str) -> None:
    expected = alone(runner_of(saved(name)))
    for mine, theirs in zip(together(runner_of(saved(name), num_threads=3), 7), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_step_that_is_cut_off_leaves_the_state_as_it_was(
    saved: Callable[[str], Path], name: str, backend: str
) -> None:
    runner, tokens = runner_of(saved(name), backend), sequences()[-1]
    driver = Driver(runner)
    for each in ("whole", "cut off"):
        driver.add(each, tokens)
    driver.logits(whole=20, **{"cut off": 20})
    batch = dataclasses.replace(driver.batch(**{"cut off": 9}), cut_off_s=-1.0)
    with pytest.raises(IterationCutOff):
        runner.execute(batch, driver.sequences)
    runner.backend.cut_off_at_s = math.inf
    left = driver.remaining("whole")
    mine, theirs = driver.logits(whole=left, **{"cut off": left})
    assert mine is not None and theirs is not None and torch.equal(mine, theirs)


def item(name: str, start: int, count: int) -> StepItem:
    return StepItem(name, start, count, True, [0])


def held(name: str, computed_len: int) -> SequenceState:
    return SequenceState(name, 1, 8, 16, 8, computed_len=computed_len)


def test_a_state_goes_on_behind_its_own_tokens_alone(saved: Callable[[str], Path]) -> None:
    states = StatePool(load_model_config(saved("lfm2")), 2)
    own = {name: held(name, 4) for name in "ab"}

    def step(*items: StepItem) -> list[int]:
        with states.step(items, own, may_be_cut_off=False) as rows:
            states.rows[rows] = 1.0
            return rows

    (row,) = step(item("a", 0, 4))
    for start in (3, 5):
        with pytest.raises(IntegrityError, match=f"a state behind 4 tokens, a step from token {start}"):
            step(item("a", start, 1))
    assert step(item("a", 4, 1)) == [row]
    assert step(item("b", 0, 4)) != [row]
    with pytest.raises(IntegrityError, match="all 2 states are in use"):
        step(item("c", 0, 1))
    own["a"].computed_len = 0  # it has lost its keys and values
    assert step(item("c", 0, 1)) == [row]
    with pytest.raises(IntegrityError, match="a state behind 0 tokens"):
        step(item("a", 5, 1))
    with pytest.raises(ValueError, match="a step fails"), states.step([item("b", 4, 1)], own, may_be_cut_off=False):
        raise ValueError("a step fails")
    with pytest.raises(IntegrityError, match="a state behind -1 tokens"):
        step(item("b", 5, 1))
    with states.step([item("b", 0, 1)], own, may_be_cut_off=False) as rows:
        assert not states.rows[rows].any(), "a sequence begins with nothing of another one"


def test_no_more_sequences_hold_blocks_than_may_have_a_state() -> None:
    blocks = BlockManager(9, 4, most_sequences=2)
    assert blocks.may_begin
    assert blocks.grow("a", 4) and blocks.grow("b", 9)
    assert not blocks.may_begin and blocks.grow("a", 5) is not None
    blocks.release("b")
    assert blocks.may_begin


BLOCK_SIZE = 16
TIGHT = EngineConfig(block_size=BLOCK_SIZE, max_batch_tokens=24, max_num_seqs=5, num_threads=1, max_model_len=100)


def engine(path: Path, num_blocks: int, preset: str = "fcfs", **changes: Any) -> Engine:
    memory = num_blocks * BLOCK_SIZE * load_model_config(path).kv_bytes_per_token(torch.float32)
    config = dataclasses.replace(TIGHT, kv_memory=str(memory), **changes)
    return Engine(path, dtype="float32", engine=config, scheduler=SchedulerConfig(preset=preset))


PROMPTS = random_prompts(14)
SAMPLING = [SamplingParams(30, temperature=0.8, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(saved: Callable[[str], Path]) -> list[tuple[int, ...]]:
    """Answers where there is room for all."""
    return [each.token_ids for each in engine(saved("qwen3.5"), 60).generate(PROMPTS, SAMPLING)]


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.mode == "continuous"])
def test_every_preset_serves_a_model_with_states(
    saved: Callable[[str], Path], preset: str, expected: list[tuple[int, ...]]
) -> None:
    """In a pool where sequences lose their keys, values and states: the tokens stay, and no prefix is taken."""
    served = engine(saved("qwen3.5"), 8, preset)
    found, _ = outputs_of(served, [served.submit(*each) for each in zip(PROMPTS, SAMPLING, strict=True)])
    assert served.worker.executor.prefix_hits == 0
    assert found == expected


def logged_outputs(
    engine: Engine, prompts: list[list[int]], sampling: list[SamplingParams]
) -> list[list[tuple[tuple[int, ...], DeltaLogprobs | None]]]:
    """The tokens of each request with the float32 log probabilities of those that were likely."""
    found: dict[str, list[tuple[tuple[int, ...], DeltaLogprobs | None]]] = {
        engine.submit(*each): [] for each in zip(prompts, sampling, strict=True)
    }
    while not engine.idle:
        for delta in engine.step():
            found[delta.request_id].append((delta.token_ids, delta.logprobs))
    engine.check_integrity()
    return list(found.values())


def prefixed_prompts(rng: random.Random) -> list[list[int]]:
    """Prompts that begin alike: a few words, and what was said before."""
    told: list[list[int]] = [[rng.randrange(3, 300) for _ in range(rng.choice([15, 16, 33, 47]))] for _ in range(2)]
    for _ in range(10):
        before = rng.choice(told)
        own = [rng.randrange(3, 300) for _ in range(rng.randint(0, 20))]
        told.append([*before[: rng.choice([len(before), rng.randint(1, len(before))])], *own][:70])
    return rng.sample(told, len(told))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "seeds",
    [range(9), *(pytest.param(range(i, i + 80), marks=pytest.mark.nightly) for i in range(9, 849, 80))],
    ids=str,
)
def test_hits_and_misses_give_the_same_bits(
    saved: Callable[[str], Path], name: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 requests a round, each of them a case, in steps of any size, with preemptions and few places for states."""
    monkeypatch.setattr("farsight.kvcache.checkpoints.SHORTEST_SPACING", 16)
    monkeypatch.setattr("farsight.kvcache.checkpoints.OUTPUT_SPACING", 16)
    config = load_model_config(saved(name))
    miss = engine(saved(name), 60, prefix_cache=False)
    hits = queries = 0
    for some in range(seeds.start, seeds.stop, 3):
        rng = random.Random(some)
        sizes = {"max_batch_tokens": rng.randint(5, 40), "state_memory": str(rng.randint(1, 9) * config.state_bytes)}
        hit = engine(saved(name), rng.choice([8, 10, 40]), **sizes)
        for seed in range(some, min(some + 3, seeds.stop)):
            prompts = prefixed_prompts(random.Random(seed))
            sampling = [
                SamplingParams(rng.randint(1, 20), temperature=0.8, seed=i, ignore_eos=True, logprobs=1)
                for i in range(len(prompts))
            ]
            assert logged_outputs(hit, prompts, sampling) == logged_outputs(miss, prompts, sampling), f"round {seed}"
        hits, queries = hits + hit.worker.executor.prefix_hits, queries + hit.worker.executor.prefix_queries
    assert 0.08 < hits / queries < 1


def test_memory_for_states_holds_at_least_one(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.state_memory.*room for a state of \d+ bytes"):
        engine(saved("lfm2"), 8, state_memory="16")
    with pytest.raises(ConfigError, match=r"engine\.state_memory.*auto, or 0 for none"):
        EngineConfig(state_memory="all")
    none = engine(saved("lfm2"), 20, state_memory="0")
    none.generate([PROMPTS[0] * 9] * 2, SamplingParams(1))
    assert none.worker.executor.prefix_queries == 0


def test_resumed_after_a_kill(saved: Callable[[str], Path], expected: list[tuple[int, ...]]) -> None:
    """A new worker gets prompt and output so far, and goes on with the same tokens."""
    for cut in (1, 13, 29):
        resumed = engine(saved("qwen3.5"), 60)
        for i in (0, 5):
            sampling = dataclasses.replace(SAMPLING[i], max_new_tokens=30 - cut)
            first = resumed.generate([[*PROMPTS[i], *expected[i][:cut]]], sampling)[0].token_ids
            assert len(first) == 30 - cut
            greedy = SamplingParams(30, temperature=0.0, ignore_eos=True)
            whole = resumed.generate([PROMPTS[i]], greedy)[0].token_ids
            rest = dataclasses.replace(greedy, max_new_tokens=30 - cut)
            assert resumed.generate([[*PROMPTS[i], *whole[:cut]]], rest)[0].token_ids == whole[cut:]


@pytest.mark.parametrize(
    ("field", "changes"),
    [("engine.host_kv_memory", {"host_kv_memory": "1MiB"}), ("engine.speculation", {"speculation": "ngram"})],
)
def test_what_states_cannot_do_is_refused(saved: Callable[[str], Path], field: str, changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=field):
        engine(saved("lfm2"), 8, **changes)


def test_several_ranks_are_refused(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel.*differ in shape"):
        check_parallel(Mesh(2, 1), load_model_config(saved("lfm2")), TIGHT)
