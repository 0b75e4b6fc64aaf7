"""FastServe's MLFQ-preemption: iterations that outlast a quantum are cut off, and outputs are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config.engine import EngineConfig
from core.config.load import make_config
from core.config.scheduling import SchedulerConfig
from core.errors import ConfigError
from core.request import SamplingParams
from engine.engine import Engine

PROMPTS = [[5 + (i * 7 + j) % 50 for j in range(40 + 20 * i)] for i in range(4)]


def generated(folder: Path, backend: str, mlfq: str) -> tuple[list[list[int]], int]:
    """Outputs of four requests that share one place, and how many of their steps were cut off."""
    quanta = {"quantum_s": 1e-6, "quantum_ratio": 16.0, "starve_limit_s": 1e6}
    scheduler = SchedulerConfig(preset="fastserve", mlfq=mlfq, **quanta)  # type: ignore[arg-type]
    engine = Engine(folder, engine=EngineConfig(backend=backend, max_num_seqs=1), scheduler=scheduler)
    order = [engine.submit(prompt, SamplingParams(6, ignore_eos=True)) for prompt in PROMPTS]
    found: dict[str, list[int]] = {request_id: [] for request_id in order}
    while not engine.idle:
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
    engine.check_integrity()
    return [found[request_id] for request_id in order], engine.worker.executor.num_cut_off


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_streams_are_the_same_with_and_without_iterations_that_are_cut_off(backend: str, tiny_model_dir: Path) -> None:
    """The first quantum is a microsecond, so every first iteration is cut off on any machine."""
    whole, none = generated(tiny_model_dir, backend, "no-preemption")
    cut, num = generated(tiny_model_dir, backend, "preemption")
    assert cut == whole and all(len(each) == 6 for each in whole)
    assert none == 0 and num >= len(PROMPTS)


@pytest.mark.parametrize("tables", [{"engine": {"device": "cuda"}}, {"model": {"tensor_parallel": 2}}])
def test_where_no_iteration_can_be_cut_off_it_is_refused(tables: dict[str, dict[str, object]]) -> None:
    make_config({**tables, "scheduler": {"preset": "fastserve", "mlfq": "no-preemption"}})
    with pytest.raises(ConfigError, match=r"scheduler\.mlfq: got 'preemption'.*cpu and emulated"):
        make_config({**tables, "scheduler": {"preset": "fastserve", "mlfq": "preemption"}})
    with pytest.raises(ConfigError, match=r"scheduler\.mlfq.*skip-join, no-preemption, preemption"):
        make_config({"scheduler": {"mlfq": "naive"}})
