"""What a GPU would be given, and what is said where there is none; the memory that pools are sized by."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks.common.gpu_models import model_config, save_random_checkpoint
from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError
from farsight.core.request import Residency, SamplingParams
from farsight.engine import Engine, cuda
from farsight.engine.attention.choice import gpu_attention
from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.build import build_worker
from farsight.engine.checkpoint.dtypes import parse_dtype
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.devices import model_device
from farsight.engine.devices.model_device import RECORDING_BYTES, load_gpu_device
from farsight.engine.kv_pool import KVPool
from farsight.engine.runner import available_bytes, largest_step
from farsight.engine.steps.backends import GraphBackend
from farsight.engine.steps.compiles import keep_compiled
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import KVCopy
from tests.unit.engine.devices.test_stream_copier import Stream
from tests.unit.engine.driver import Driver

SIZES = StepSizes(4, 4)

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@needs_no_gpu
def test_no_gpu(tiny_model_dir) -> None:
    with pytest.raises(ConfigError, match=r"engine\.device: got 'cuda', expected cpu \(torch"):
        build_worker(tiny_model_dir, "auto", EngineConfig(device="cuda"), "w")


def test_sizes_of_a_device() -> None:
    sizes = {device: EngineConfig(device=device).kv_block_size for device in ("cpu", "cuda", "emulated:a100-7b")}
    assert sizes == {"cpu": 32, "cuda": 64, "emulated:a100-7b": 32}
    assert EngineConfig(device="cuda", block_size=128).kv_block_size == 128
    tokens = {device: EngineConfig(device=device).step_tokens for device in ("cpu", "cuda", "emulated:a100-7b")}
    assert tokens == {"cpu": 1024, "cuda": 8192, "emulated:a100-7b": 1024}
    assert EngineConfig(device="cuda", max_batch_tokens=64).step_tokens == 64


def test_where_compiled_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    keep_compiled()
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    keep_compiled()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "kernels")


def test_dtype_of_a_device(model_dir) -> None:
    config = load_model_config(model_dir("gqa"))
    assert (parse_dtype("auto", config), parse_dtype("auto", config, "cuda")) == (torch.float32, torch.bfloat16)
    assert parse_dtype("float32", config, "cuda") is torch.float32


def pool(config, block_size: int = 64, dtype: torch.dtype = torch.bfloat16) -> KVPool:
    return KVPool(config, num_blocks=2, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "block_size", "dtype", "reason"),
    [
        ("gqa", 48, torch.bfloat16, "block_size 48: multiples of 64"),
        ("gqa", 64, torch.float32, "float32: float16 and bfloat16"),
        ("mistral", 64, torch.bfloat16, "sliding-window"),
        ("qwen3", 64, torch.bfloat16, "head_dim 48"),
    ],
)
def test_what_xformers_does_not_compute(
    shape: str, block_size: int, dtype: torch.dtype, reason: str, model_dir, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_model_config(model_dir(shape))
    with pytest.raises(ConfigError, match=rf"engine\.backend: got 'xformers'.*{reason}"):
        gpu_attention("xformers", config, pool(config, block_size, dtype), SIZES)
    with caplog.at_level(logging.WARNING):
        assert isinstance(gpu_attention("auto", config, pool(config, block_size, dtype), SIZES), TorchAttention)
    assert reason in caplog.text


def test_other_backends_on_a_gpu(tiny_model_dir) -> None:
    config = load_model_config(tiny_model_dir)
    assert isinstance(gpu_attention("torch", config, pool(config), SIZES), TorchAttention)
    with pytest.raises(ConfigError, match="native computes on the CPU"):
        gpu_attention("native", config, pool(config), SIZES)
    with pytest.raises(ConfigError, match="xformers computes on a GPU"):
        ModelRunner.from_dir(tiny_model_dir, dtype=torch.float32, num_blocks=4, block_size=64, backend="xformers")


@pytest.mark.parametrize(("max_num_seqs", "max_batch_tokens"), [(3, 50), (1, 17), (20, 7)])
def test_the_largest_step(max_num_seqs: int, max_batch_tokens: int, tiny_model_dir) -> None:
    """It holds what a step may hold, and runs."""
    engine = EngineConfig(max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, block_size=16)
    batch, sequences, num_blocks = largest_step(engine)
    assert batch.num_tokens == max_batch_tokens
    assert len(batch.items) == min(max_num_seqs, max_batch_tokens)
    runner = ModelRunner.from_dir(
        tiny_model_dir, dtype=torch.float32, num_blocks=num_blocks, block_size=16, backend="torch"
    )
    assert None not in runner.execute(batch, sequences)
    assert [sequence.sampling.greedy for sequence in sequences.values()] == [False] * len(sequences)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """In the place of the calls to CUDA; keeps what they were asked."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    asked = SimpleNamespace(shares=[], beside=[], pinned=[], free=10**9)

    def free_bytes(utilization: float, step: Callable[[], object], more_bytes: int) -> int:
        asked.shares.append(utilization)
        asked.beside.append((step(), more_bytes))
        return asked.free

    monkeypatch.setattr(cuda, "device_problem", lambda: None)
    monkeypatch.setattr(cuda, "free_bytes", free_bytes)
    monkeypatch.setattr(cuda, "Graphs", lambda: lambda run: run)
    monkeypatch.setattr(cuda, "SideStream", Stream)
    monkeypatch.setattr(cuda, "pin", asked.pinned.append)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    return asked


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_device_is_put_together(
    bits: int, tmp_path, stand_ins: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU, but for the calls to CUDA: a checkpoint, a pool of what is left, a host pool, recorded steps."""
    config = model_config("tiny", tmp_path, num_hidden_layers=2)
    save_random_checkpoint(config, tmp_path, torch.bfloat16)
    stand_ins.free = 10 * 64 * config.kv_bytes_per_token(torch.bfloat16) + 1
    engine = EngineConfig(block_size=64, max_num_seqs=3, max_batch_tokens=90, gpu_memory_utilization=0.7)
    with caplog.at_level(logging.WARNING):
        device = load_gpu_device(tmp_path, config, "bfloat16", engine, 1, swaps=True, bits=bits)
    assert "device=cpu (supported: {'cuda'})" in caplog.text  # xformers was asked
    assert stand_ins.shares == [0.7]
    ((beside, more_bytes),) = stand_ins.beside
    assert isinstance(beside, GraphBackend)  # its recorded steps count, those of the largest sizes
    assert more_bytes == 3 * 2 * RECORDING_BYTES + 2 * 4 * RECORDING_BYTES  # 1, 2, 3 rows; 16 to 128 tokens
    assert (device.num_blocks, device.num_host_blocks, device.context_len) == (10, 10, 1024)
    assert [tensor.shape for tensor in stand_ins.pinned] == [(10, 2 * 2 * 64 * 4 * 32)]
    assert isinstance(device.runner, ModelRunner)
    assert device.runner.max_model_len == 640
    driver = Driver(device.runner)
    driver.add("a", list(range(3, 80)))
    tokens = [driver.step(a=77)[0], driver.step(a=1)[0], driver.step(a=1)[0]]
    assert None not in tokens
    again = ModelRunner.from_dir(
        tmp_path, dtype=torch.bfloat16, num_blocks=8, block_size=64, backend="torch", bits=bits
    )
    reference = Driver(again)
    reference.add("a", list(range(3, 80)))
    assert [reference.step(a=count)[0] for count in (77, 1, 1)] == tokens
    assert device.copier is not None
    device.copier.begin(KVCopy(1, Residency.HOST, (0, 1), (4, 7)))
    device.copier.wait()
    assert device.copier.take_done() == [(1, False)]


def test_an_engine_over_it(tiny_model_dir, stand_ins: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded steps and copies on a stream under a preset that moves KV: tokens as without any of that."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randint(1, 90))] for _ in range(12)]
    params = [SamplingParams(30, temperature=i % 2, seed=i, ignore_eos=True) for i in range(12)]

    def engine(kv_memory: str, preset: str) -> Engine:
        config = EngineConfig(kv_memory=kv_memory, max_num_seqs=6, num_threads=1, block_size=16, max_batch_tokens=64)
        return Engine(tiny_model_dir, dtype="float32", engine=config, scheduler=SchedulerConfig(preset=preset))

    expected = [answer.token_ids for answer in engine("4MiB", "fcfs").generate(prompts, params)]
    monkeypatch.setattr(model_device, "load_device", load_gpu_device)
    moving = engine("128KiB", "fastserve")
    assert [answer.token_ids for answer in moving.generate(prompts, params)] == expected
    traffic = moving.worker.executor.report().traffic
    assert traffic.offloads > 0 and traffic.uploads > 0 and stand_ins.pinned


GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB after a large file was read: 1 GiB is free and 50 GiB are available."""
    names = ("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "Shmem", "Active", "Inactive")
    kib = dict(zip(names, (64, 1, 50, 0, 55, 0, 5, 50), strict=True))
    (tmp_path / "meminfo").write_text("".join(f"{name}: {size * GIB // 1024} kB\n" for name, size in kib.items()))
    (tmp_path / "zoneinfo").write_text("")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    return tmp_path


def test_files_that_can_be_dropped_take_nothing(machine: Path) -> None:
    assert available_bytes(machine / "none") == 50 * GIB


@pytest.mark.parametrize(("limit", "expected"), [("max", 50 * GIB), (str(8 * GIB), 7 * GIB), (str(GIB), 0)])
def test_a_container_takes_what_its_limit_leaves(machine: Path, limit: str, expected: int) -> None:
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text(f"{3 * GIB}\n")
    (machine / "memory.stat").write_text(f"anon {GIB}\nfile {2 * GIB}\ninactive_file {2 * GIB}\n")
    assert available_bytes(machine) == expected
