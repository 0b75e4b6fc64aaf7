"""Our own kernels of attention: in Triton's interpreter, compiled for a GPU, and none compiled while serving."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.common.gpu_models import model_config, save_random_checkpoint
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine.devices.model_device import load_gpu_device
from farsight.engine.steps.backends import GraphBackend
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver
from tests.unit.engine.models.test_fused import interpret

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")

FOLDER = Path(__file__).parent
NUM_BLOCKS = 60


@pytest.mark.timeout(900)
def test_small_layouts_and_draws() -> None:
    """One process for all kernels: it takes longer to begin than the tests do."""
    draws = FOLDER.parent / "sampling" / "interpreted_draws.py"
    interpret(FOLDER / "interpreted_triton.py", str(draws), "-k", "small")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_all_layouts() -> None:
    interpret(FOLDER / "interpreted_triton.py", "-k", "not small")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_nothing_spills_on_a_gpu() -> None:
    """Every size of heads, alone and with all that a model may ask for."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_kernels", "--group", "1", "4", "16"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("chunks") == 6 * 3 * 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_kernel_is_compiled_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thousand random steps of a stand-in that compiles as a GPU would, behind a start as on a GPU: all kernels side
    by side, none but those."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    from triton import knobs

    from benchmarks.common.stand_in_gpu import serving
    from benchmarks.gpu_kernels import compiled

    config = model_config("tiny", tmp_path, num_hidden_layers=2)
    save_random_checkpoint(config, tmp_path, torch.bfloat16)
    engine = EngineConfig(block_size=64, max_num_seqs=6, max_batch_tokens=201, host_kv_memory="0")
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)  # that of the backend goes with the test
    with serving(NUM_BLOCKS * 64 * config.kv_bytes_per_token(torch.bfloat16), capture) as found:
        runner = load_gpu_device(tmp_path, config, "bfloat16", engine, 1, swaps=False, bits=0).runner
        assert isinstance(runner, ModelRunner) and isinstance(runner.backend, GraphBackend)
        at_start = len(found)
        assert 0 < at_start <= 20 and f"{at_start} kernels compiled" in caplog.text
        kinds = run_random_steps(runner, 1000)
        assert min(kinds.values()) > 50, kinds
        sampled = [SamplingParams(1, temperature=1.0, top_p=0.9)] * 9  # more rows than steps have
        runner.sampler.sample(torch.zeros(9, config.vocab_size), sampled, range(9))
        assert runner.backend.compiles.names == [] and len(found) == at_start
    compiled(64, 16, plain=True)  # what was not there is counted
    assert runner.backend.compiles.names == ["_attend", "_add_up", "_attend"]


def capture(run: Callable[[], object]) -> Callable[[], None]:
    def replay() -> None:
        run()

    replay()
    return replay


def run_random_steps(runner: ModelRunner, num_steps: int) -> dict[str, int]:
    """Prompts whole and in chunks, rows, and both; how many steps of each kind there were.

    The logits are whatever the memory held, so tokens are made up.
    """
    rng = random.Random(0)
    driver = Driver(runner)
    kinds = dict.fromkeys(("rows", "chunks", "both"), 0)
    for step in range(num_steps):
        for name in (f"s{i}" for i in range(6)):
            if name in driver.sequences and driver.remaining(name) == 1 and rng.random() < 0.1:
                driver.remove(name)
            if name not in driver.sequences:
                driver.add(name, [rng.randrange(3, 500) for _ in range(rng.randint(1, 300))])
        chosen = rng.sample(sorted(driver.sequences), rng.randint(1, 6))
        if step % 3 == 0:  # those that decode
            chosen = [name for name in chosen if driver.remaining(name) == 1] or chosen
        work = {name: min(driver.remaining(name), rng.choice((1, 2, 17, 33))) for name in chosen}
        driver.logits(**work)
        lengths = set(work.values())
        kinds["rows" if lengths == {1} else "both" if 1 in lengths else "chunks"] += 1
        for name in chosen:
            if not driver.remaining(name):
                driver.sequences[name].token_ids.append(rng.randrange(3, 500))
    return kinds
