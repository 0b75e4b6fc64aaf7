"""What decides who runs when decides nothing about what comes out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import services
from core.config.engine import EngineConfig
from core.config.scheduling import SchedulerConfig
from core.messages.kv import KVTraffic
from core.request import SamplingParams
from engine import Engine
from policies.compose import swaps_kv
from policies.presets import PRESETS

MODEL = Path(services.__file__).parent / "embedded_model"
PROMPTS = [f"Count to {number}: " * (1 + number * 7 % 5 + 30 * (number % 5 == 0)) for number in range(20)]
"""25 to 400 tokens."""

ROOMY, TIGHT = "64MiB", "1500KiB"
"""The latter holds 23 blocks of 32 tokens: the long prompts one at a time."""

RECOMPUTING = {"fcfs", "aggressive", "fastserve-recompute", "farsight"}
"""`farsight` stops streams only where memory runs out, and its victim here holds too few tokens to be worth a copy."""

CONTINUOUS = [name for name, preset in PRESETS.items() if preset.mode == "continuous"]


def answers(preset: str, kv_memory: str) -> tuple[list[tuple[int, ...]], KVTraffic]:
    """Greedy, in fp32, one request every six steps; a clock that no machine's speed moves."""
    config = EngineConfig(kv_memory=kv_memory, max_num_seqs=8)
    # Without ageing, so that under `farsight-mean` long prompts lose their places to short ones and KV moves.
    scheduler = SchedulerConfig(preset=preset, watermark=1.0, gamma=0.0)
    ticks = itertools.count()
    engine = Engine(MODEL, dtype="float32", engine=config, scheduler=scheduler, clock=lambda: 0.005 * next(ticks))
    outputs: dict[str, list[int]] = {}
    prompts = iter(PROMPTS)
    for step in itertools.count():
        if step % 6 == 0 and (prompt := next(prompts, None)) is not None:
            outputs[engine.submit(prompt, SamplingParams(48, ignore_eos=True))] = []
        for delta in engine.step():
            assert delta.start == len(outputs[delta.request_id])
            outputs[delta.request_id] += delta.token_ids
        engine.check_integrity()
        if engine.idle and len(outputs) == len(PROMPTS):
            break
    executor = engine.worker.executor
    assert executor.blocks.num_free == executor.blocks.num_blocks
    assert (executor.host is not None) == swaps_kv(scheduler), "by default there is a host pool where one is needed"
    return [tuple(tokens) for tokens in outputs.values()], executor.report().traffic


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    tokens, traffic = answers("fcfs", ROOMY)
    assert traffic == KVTraffic()
    return tokens


@pytest.mark.parametrize("preset", CONTINUOUS)
def test_every_preset_gives_the_same_tokens(preset: str, expected: list[tuple[int, ...]]) -> None:
    tokens, traffic = answers(preset, TIGHT)
    assert tokens == expected
    swaps = swaps_kv(SchedulerConfig(preset=preset)) and preset not in RECOMPUTING
    assert (traffic.offloads > 0) == (traffic.uploads > 0) == swaps
    assert traffic.recomputed_tokens > 0 or preset not in RECOMPUTING
