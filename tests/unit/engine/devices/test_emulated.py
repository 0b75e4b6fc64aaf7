"""The emulated device keeps its profile's time, and its tokens follow from request and position alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farsight import services
from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.core.images import ImageSpan
from farsight.core.request import Request, Residency, SamplingParams
from farsight.engine import Engine
from farsight.engine.build import build_worker, check_worker
from farsight.engine.devices.emulated import (
    LEAST_SHARE,
    MAX_LATE_S,
    EmulatedCopier,
    EmulatedRunner,
    EmulatedVision,
    Pace,
    emulate_vision,
    token_hash,
)
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import IterationCutOff, LoggedTokens
from farsight.engine.vision.geometry import load_geometry
from farsight.estimator.profile_file import A100_7B, find_device_profile, resolve_device
from farsight.kvcache import KVCopy, StepBatch, StepItem
from tests.unit.engine.vision.models import SHAPES

MODEL = Path(services.__file__).parent / "embedded_model"
KV_BYTES = 1024
COST = StepCost(base_s=1.0, prefill_token_s=0.1, decode_seq_s=0.02, context_token_s=0.001, prefill_pair_s=0.0001)
PROFILE = {
    "base_s": 2e-5,
    "prefill_token_s": 1e-7,
    "decode_seq_s": 1e-7,
    "context_token_s": 1e-9,
    "kv_bytes": KV_BYTES,
    "copy_bandwidth": 1e9,
}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> str:
    return emulated(tmp_path_factory.mktemp("profile") / "quick.json", PROFILE)


def emulated(path: Path, profile: dict[str, float]) -> str:
    path.write_text(json.dumps(profile))
    return f"emulated:{path}"


class Time:
    """A clock that only sleeping moves, and whose sleeps are too long by ``overshoot_s``."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.now = 100.0
        self.overshoot_s = overshoot_s
        self.pace = Pace(lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.overshoot_s


def sequence(name: str, prompt: tuple[int, ...] = (5, 6, 7), output: tuple[int, ...] = (), **sampling) -> Sequence:
    return Sequence.of(Request(name, 0, "i", prompt, SamplingParams(**{"max_new_tokens": 99} | sampling), output))


def decode(*sequences: Sequence) -> StepBatch:
    """One token more of each."""
    items = [StepItem(each.request.request_id, len(each.token_ids) - 1, 1, True, [0]) for each in sequences]
    return StepBatch(tuple(items))


def run(runner: EmulatedRunner, *sequences: Sequence) -> list[int | None]:
    tokens = runner.execute(decode(*sequences), {each.request.request_id: each for each in sequences})
    for each, token in zip(sequences, tokens, strict=True):
        assert token is not None
        each.token_ids.append(token)
        each.num_tokens += 1
    return tokens


def test_a_step_takes_what_it_costs() -> None:
    time = Time()
    runner = EmulatedRunner(COST, [5], time.pace)
    sequences = {name: sequence(name, tuple(range(1, 11))) for name in "ab"}
    items = (StepItem("a", 0, 4, False, [0]), StepItem("b", 9, 1, True, [0]))
    assert runner.execute(StepBatch(items), sequences) == [None, 5]
    assert time.now - 100 == pytest.approx(1.0 + 4 * 0.1 + 10 * 0.0001 + 0.02 + 10 * 0.001)


def test_sleeps_that_are_too_long_and_bookkeeping_do_not_add_up() -> None:
    time = Time(overshoot_s=0.1)
    runner = EmulatedRunner(StepCost(1.0, 0, 0, 0), [5], time.pace)
    for _ in range(50):
        run(runner, sequence("a"))
        time.now += 0.3
    assert time.now - 100 == pytest.approx(50 + 0.1 + 0.3)


def took_s(time: Time, runner: EmulatedRunner) -> float:
    began_at = time.now
    run(runner, sequence("a"))
    return time.now - began_at


def test_what_the_host_is_late_is_made_good_within_the_next_steps() -> None:
    time = Time()
    runner = EmulatedRunner(StepCost(1.0, 0, 0, 0), [5], time.pace)
    assert took_s(time, runner) == pytest.approx(1.0)
    time.now += 0.8
    assert [took_s(time, runner) for _ in range(4)] == pytest.approx([LEAST_SHARE, 0.7, 1.0, 1.0])


def test_a_device_that_rested_or_was_held_up_for_long_owes_nothing() -> None:
    time = Time()
    runner = EmulatedRunner(StepCost(1.0, 0, 0, 0), [5], time.pace)
    run(runner, sequence("a"))
    time.now += 0.3
    runner.rest()
    assert took_s(time, runner) == pytest.approx(1.0)
    time.now += MAX_LATE_S + 0.1
    assert [took_s(time, runner) for _ in range(2)] == pytest.approx([1.0, 1.0])


def test_copies_of_one_direction_follow_each_other_and_those_of_both_overlap() -> None:
    ends: list[float] = []

    class Instants(Pace):
        def wait_until(self, instant: float) -> None:
            ends.append(instant)

    copier = EmulatedCopier(block_s=0.5, pace=Instants(lambda: 50.0))
    done = threading.Semaphore(0)
    copier.when_done(done.release)
    copier.begin(KVCopy(1, Residency.HOST, (1, 2, 3), (4, 5, 6)))
    copier.begin(KVCopy(2, Residency.HOST, (7, 8), (9, 10)))
    copier.begin(KVCopy(3, Residency.DEVICE, (1, 2, 3, 4), (11, 12, 13, 14)))
    for _ in range(3):
        assert done.acquire(timeout=120)
    assert sorted(ends) == [51.5, 52.0, 52.5]
    assert sorted(copier.take_done()) == [(1, False), (2, False), (3, False)]
    assert copier.take_done() == []
    copier.wait()


def test_tokens_follow_from_prompt_seed_and_position() -> None:
    runner = EmulatedRunner(StepCost(1e-9, 0, 0, 0), list(range(10, 200)), Time().pace)

    def answer(name: str, **of) -> list[int]:
        each = sequence(name, **of)
        return [token for _ in range(20) for token in run(runner, each) if token is not None]

    greedy = answer("a")
    assert answer("b", seed=7) == greedy, "a greedy answer has no seed"
    drawn = answer("a", temperature=0.7, seed=7)
    assert drawn not in (greedy, answer("a", temperature=0.7, seed=8))
    assert answer("c", temperature=0.7, seed=7) == drawn
    for at in range(3):
        prompt = tuple(6 + 3 * (at == each) for each in range(3))
        assert answer("d", prompt=prompt) != answer("d", prompt=(6, 6, 6))
    resumed = sequence("a", output=tuple(greedy[:9]))
    assert [run(runner, resumed)[0] for _ in range(11)] == greedy[9:]
    assert len({tuple(greedy), tuple(drawn)} | {tuple(answer("e", prompt=(n, 1))) for n in range(50)}) == 52


def test_what_is_asked_about_tokens_is_that_they_were_certain() -> None:
    runner = EmulatedRunner(StepCost(1e-9, 0, 0, 0), [50], Time().pace)
    asked = sequence("a", (5, 6, 7), logprobs=2, prompt_logprobs=True)
    silent = sequence("b")
    items = (StepItem("b", 2, 1, True, [0]), StepItem("a", 0, 2, False, [0]))
    tokens = runner.execute(StepBatch(items), {"a": asked, "b": silent})
    assert isinstance(tokens, LoggedTokens) and list(tokens.logprobs) == [1]
    assert tokens.logprobs[1].prompt == [((6,), (0.0,)), ((7,), (0.0,))] and tokens.logprobs[1].output is None
    assert asked.prompt_logprobs is not None
    asked.prompt_logprobs += tokens.logprobs[1].prompt
    tokens = runner.execute(StepBatch((StepItem("a", 2, 1, True, [0]),)), {"a": asked})
    assert isinstance(tokens, LoggedTokens)
    assert tokens.logprobs[0].prompt == [] and tokens.logprobs[0].output == ((50,), (0.0,))


def test_answers_are_the_same_though_memory_is_short_and_kv_moves(device: str) -> None:
    """Prompts that share prefixes, some answers drawn."""
    prompts = [[5 + number % 90] * (20 + 7 * number) for number in range(16)]
    sampling = [SamplingParams(80, temperature=n % 2, seed=n, benchmark_len=40 + n) for n in range(16)]
    found = []
    for preset, kv_memory in (("fcfs", "auto"), ("fastserve", "400KiB")):
        sizes = {"block_size": 8, "max_num_seqs": 6, "max_batch_tokens": 64, "host_kv_memory": "100KiB"}
        config = EngineConfig(device=device, kv_memory=kv_memory, **sizes)  # type: ignore[arg-type]
        engine = Engine(MODEL, engine=config, scheduler=SchedulerConfig(preset=preset))
        found.append(engine.generate(prompts, sampling))
        engine.check_integrity()
        blocks = engine.worker.executor.blocks
        assert blocks.num_free == blocks.num_blocks
        assert (engine.scheduler.num_preemptions > 0) == (preset == "fastserve")
    assert found[0] == found[1]
    assert [len(each.token_ids) for each in found[0]] == [40 + number for number in range(16)]
    assert {each.finish_reason for each in found[0]} == {"stop"}


def test_nothing_ends_an_output_but_what_was_asked_for(device: str) -> None:
    engine = Engine(MODEL, engine=EngineConfig(device=device, max_model_len=5000))
    [completion] = engine.generate(["What is this?"], SamplingParams(3000))
    assert (len(completion.token_ids), completion.finish_reason) == (3000, "length")
    worker = engine.worker
    assert set(completion.token_ids).isdisjoint(worker._eos)
    assert len(completion.text) > 1000, "tokens are text"


def test_pools_are_sized_by_the_profile(device: str) -> None:
    def sizes(**settings: Any) -> tuple[int, int, int]:
        options: dict[str, Any] = {"device": device, "block_size": 16} | settings
        ready = build_worker(MODEL, "auto", EngineConfig(**options), "w").ready
        return ready.num_blocks, ready.num_host_blocks, ready.max_model_len

    assert sizes(kv_memory="1MiB", host_kv_memory="2MiB", max_model_len=900) == (64, 128, 900)
    assert sizes(kv_memory="512KiB", max_model_len=900) == (32, 0, 512)
    assert sizes(max_model_len=100_000, max_num_seqs=3) == (3 * 6250, 0, 100_000)
    named = {"device": "emulated:a100-7b", "max_model_len": 100_000}
    assert sizes(**named) == (122_880 // 16, 0, 100_000)
    assert sizes(**named, max_num_seqs=1)[0] == 6250, "no more than a full batch can hold"


def test_a_named_profile_is_found_and_a_path_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device_profile("a100-7b") == A100_7B
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("emulated:a100-7b") == "emulated:a100-7b"
    monkeypatch.chdir(tmp_path)
    assert resolve_device("emulated:p.json") == f"emulated:{tmp_path / 'p.json'}"


def test_a_wrong_profile_is_named(tmp_path: Path) -> None:
    def refused(device: str, **settings) -> str:
        with pytest.raises(InvalidValueError) as caught:
            check_worker(MODEL, EngineConfig(device=device, **settings))
        return str(caught.value)

    assert "emulated:a100-7b" in (missing := refused("emulated:h100-70b")) and "engine.device" in missing
    bare = {name: value for name, value in PROFILE.items() if name not in ("kv_bytes", "copy_bandwidth")}
    assert "kv_bytes" in refused(emulated(tmp_path / "bare.json", bare))
    no_link = emulated(tmp_path / "no_link.json", bare | {"kv_bytes": 512})
    check_worker(MODEL, EngineConfig(device=no_link))
    assert "copy_bandwidth" in refused(no_link, host_kv_memory="1MiB")
    assert "base_s" in refused(emulated(tmp_path / "wrong.json", PROFILE | {"base_s": -1}))
    link = emulated(tmp_path / "link.json", PROFILE)
    assert "engine.kv_memory" in refused(link, kv_memory="100")
    with pytest.raises(ConfigError, match=r"engine\.host_kv_memory"):
        check_worker(MODEL, EngineConfig(device=link, host_kv_memory="100"))


def test_a_real_device_keeps_to_the_models_context() -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_model_len"):
        check_worker(MODEL, EngineConfig(max_model_len=100_000))


def test_no_torch_is_loaded(device: str) -> None:
    code = f"""
import sys
from dataclasses import replace
from pathlib import Path
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine import Engine
engine = Engine({str(MODEL)!r}, engine=EngineConfig(device={device!r}, host_kv_memory="1MiB"))
assert len(engine.generate(["Hello"], SamplingParams(5))[0].token_ids) == 5
assert not [name for name in sys.modules if name.startswith(("torch", "transformers"))]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_a_step_that_is_cut_off_takes_its_time_and_brings_nothing() -> None:
    time = Time()
    runner = EmulatedRunner(StepCost(1.0, 0, 0, 0), [5], time.pace)
    one = sequence("a")
    with pytest.raises(IterationCutOff):
        runner.execute(replace(decode(one), cut_off_s=0.25), {"a": one})
    assert time.now - 100 == pytest.approx(0.25)
    assert runner.execute(replace(decode(one), cut_off_s=1.0), {"a": one}) == [5]  # it just fits
    assert time.now - 100 == pytest.approx(1.25)


WITH_EYES = {"base_s": 1.0, "prefill_token_s": 0.1, "decode_seq_s": 0.0, "context_token_s": 0.0, "kv_bytes": 8}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The configuration of a model that sees; an emulated encoder reads no weights."""
    given = SHAPES["llava"]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [given["architecture"]], **given["config"]}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given["processor"]))
    return tmp_path


def test_pictures_take_their_tokens_time(model_dir: Path) -> None:
    (model_dir / "profile.json").write_text(json.dumps({**WITH_EYES, "image_token_s": 0.5, "image_batch_s": 3.0}))
    clock = Time()
    vision = emulate_vision(model_dir, str(model_dir / "profile.json"), clock.pace)
    assert isinstance(vision, EmulatedVision)
    image = vision.geometry.prepare(np.zeros((20, 30, 3), np.uint8))
    assert image.num_tokens == 16 == load_geometry(model_dir).tokens_of(30, 20)  # type: ignore[union-attr]
    rows = vision.encode([image, image])
    assert clock.now == pytest.approx(103.0 + 2 * 16 * 0.5)
    assert [each.shape for each in rows] == [(16, 64)] * 2 and vision.hidden_size == 64
    assert vision.packed(rows[0]) == bytes(2 * 16 * 64)
    assert vision.encode([]) == [] and clock.now == pytest.approx(119.0)


def test_profiles_say_what_a_picture_takes(model_dir: Path) -> None:
    path = model_dir / "profile.json"
    path.write_text(json.dumps(WITH_EYES))
    assert find_device_profile(str(path)).image_cost.is_free
    assert find_device_profile("a100-7b").image_cost == A100_7B.image_cost and not A100_7B.image_cost.is_free
    (model_dir / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert emulate_vision(model_dir, "a100-7b") is None


def test_answers_follow_from_the_picture() -> None:
    def answer(digest: bytes) -> list[int]:
        request = Request("r", 0, "i", (7,) * 6, SamplingParams(9), images=(ImageSpan(1, 4, digest),))
        named = Sequence.of(request).named_ids
        return [token_hash(named, request, index) for index in range(6)]

    cat, other = answer(b"a cat's digest"), answer(b"a dog's digest")
    assert cat == answer(b"a cat's digest")
    assert (cat[0], cat[5]) == (other[0], other[5])
    assert not set(cat[1:5]) & set(other[1:5])
