"""What decides who runs when decides nothing about what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

import services
from core.config import EngineConfig, SchedulerConfig
from core.request import SamplingParams
from engine import Engine
from policies.presets import PRESETS

MODEL = Path(services.__file__).parent / "embedded_model"
PROMPTS = [f"Count to {number}: " * (1 + number % 5) for number in range(20)]
CONTINUOUS = [name for name, preset in PRESETS.items() if preset.mode == "continuous"]


def answers(preset: str) -> list[tuple[int, ...]]:
    """Greedy, in fp32, in a pool that does not hold them all."""
    config = EngineConfig(kv_memory="1MiB", max_num_seqs=8, host_kv_memory="1MiB")
    engine = Engine(MODEL, dtype="float32", engine=config, scheduler=SchedulerConfig(preset=preset))
    completions = engine.generate(PROMPTS, SamplingParams(24))
    engine.check_integrity()
    blocks = engine.worker.executor.blocks
    assert blocks.num_free == blocks.num_blocks
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return answers("fcfs")


@pytest.mark.parametrize("preset", [name for name in CONTINUOUS if name != "fcfs"])
def test_every_preset_gives_the_same_tokens(preset: str, expected: list[tuple[int, ...]]) -> None:
    assert answers(preset) == expected
