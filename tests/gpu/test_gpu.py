"""What only a GPU can show. Needs neither Ray nor a network: ``python -m benchmarks.gpu_check`` runs all of it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.gpu_models import model_config, random_weights, save_random_checkpoint
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine import cuda
from farsight.engine.attention.choice import gpu_attention
from farsight.engine.attention.layout import StepSizes
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.weights import ModelWeights
from farsight.engine.devices.copiers import StreamCopier, host_blocks
from farsight.engine.devices.model_device import load_gpu_device
from farsight.engine.kv_pool import KVPool
from farsight.engine.native.sampler import NativeSampler
from farsight.engine.sampling.device_draws import DeviceDraws, DeviceSampler
from farsight.engine.sampling.sampler import NO_TOKEN, Sampler
from farsight.engine.steps.backends import GraphBackend, TorchBackend
from farsight.engine.steps.careful_steps import CarefulSteps
from farsight.engine.steps.model_runner import ModelRunner
from tests.gpu.moving import MovingDriver, wander
from tests.unit.engine.driver import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(cuda.device_problem() is not None, reason=f"no GPU: {cuda.device_problem()}"),
]

NEAR_TIE = 1e-4
"""Where two float32 logits are closer than this, either token is right."""

MAX_LEN = 512
PAGE_SIZE = 64

KINDS = {"triton": "TritonAttention", "xformers": "XformersAttention", "torch": "TorchAttention"}
"""Classes by name: a package that is missing takes only the tests with it that need it."""

kernels = pytest.mark.parametrize("attention", ["triton", "xformers"])


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """Each test begins with an empty device."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def make_runner(
    config: DecoderConfig,
    weights: ModelWeights,
    attention: str,
    *,
    graphs: bool = False,
    compiled: bool = False,
    num_blocks: int = 96,
    max_rows: int = 16,
    max_len: int = MAX_LEN,
    careful: CarefulSteps | None = None,
) -> ModelRunner:
    """A runner over a pool full of NaN."""
    dtype = weights.embedding.dtype
    pool = KVPool(config, num_blocks=num_blocks, block_size=PAGE_SIZE, dtype=dtype, device="cuda", spare=True)
    for cache in (*pool.keys, *pool.values):
        cache.fill_(float("nan"))
    sizes = StepSizes(max_rows, -(-max_len // PAGE_SIZE), 512)
    if attention == "xformers":
        pytest.importorskip("xformers")
    kind = gpu_attention(attention, config, pool, sizes)
    assert type(kind).__name__ == KINDS[attention]
    if graphs:
        backend: TorchBackend = GraphBackend(
            config, weights, pool, max_len, kind, sizes, cuda.Graphs(), cuda.synchronize, compiled=compiled
        )
    else:
        backend = TorchBackend(config, weights, pool, max_len, kind, compiled=compiled)
    return ModelRunner(config, pool, backend, max_len, careful=careful)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., tuple[DecoderConfig, ModelWeights]]:
    def make(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> tuple[DecoderConfig, ModelWeights]:
        config = model_config("tiny", tmp_path, **changes)
        return config, random_weights(config, dtype, "cuda")

    return make


def compare(ours: Driver, reference: Driver, num_steps: int, tolerance: float, max_prompt: int = 300) -> int:
    """Prompts whole and in chunks, and decode rows, in the same steps; logits close, and tokens the same unless near.

    Args:
        tolerance: The largest difference of logits allowed, as a share of their root mean square.

    Returns:
        How many tokens were compared.
    """
    rng = random.Random(0)
    names = [f"s{i}" for i in range(8)]
    for name in names:
        prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, max_prompt))]
        for driver in (ours, reference):
            driver.add(name, prompt)
    num_compared = 0
    for _ in range(num_steps):
        chosen = [name for name in names if rng.random() < 0.7] or names[:1]
        work = {name: min(ours.remaining(name), rng.choice((1, 17, 130, max_prompt))) for name in chosen}
        for name, found, expected in zip(work, ours.logits(**work), reference.logits(**work), strict=True):
            assert (found is None) == (expected is None)
            if found is None or expected is None:
                continue
            scale = expected.square().mean().sqrt()
            assert (found - expected).abs().max() < tolerance * scale
            best = expected.topk(2)
            near = best.values[0] - best.values[1] < 2 * tolerance * scale
            assert near or found.argmax() == best.indices[0]
            num_compared += 1
            token = int(best.indices[0])
            for driver in (ours, reference):
                driver.sequences[name].token_ids.append(token)
    return num_compared


@kernels
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {"num_key_value_heads": 8}),
        (torch.bfloat16, {"num_key_value_heads": 1}),
        (torch.float16, {"head_dim": 64}),
        (torch.bfloat16, {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ],
    ids=["gqa", "mha", "mqa", "head dim 64", "head dim 128"],
)
def test_tokens_are_those_of_the_torch_backend(
    tiny, attention: str, dtype: torch.dtype, changes: dict[str, object]
) -> None:
    """Compiling takes seconds for each shape: not for every pair of shape and dtype."""
    config, weights = tiny(dtype, **changes)
    ours = Driver(make_runner(config, weights, attention, graphs=True, max_rows=8))
    reference = Driver(make_runner(config, weights, "torch"))
    assert compare(ours, reference, 40, 0.25 if dtype is torch.bfloat16 else 0.05) > 40


def test_float32_is_that_of_the_cpu(tiny, tmp_path: Path) -> None:
    """The torch backend on both, with recorded steps here: the same tokens."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config, weights = tiny(torch.float32)
    on_cpu = random_weights(config, torch.float32, "cpu")
    _copy_weights(weights, on_cpu)
    pool = KVPool(config, num_blocks=96, block_size=PAGE_SIZE, dtype=torch.float32)
    cpu = ModelRunner(config, pool, TorchBackend(config, on_cpu, pool, MAX_LEN), MAX_LEN)
    ours, reference = Driver(make_runner(config, weights, "torch", graphs=True)), Driver(cpu)
    _compare_on_two_devices(ours, reference)


def _copy_weights(source: ModelWeights, target: ModelWeights) -> None:
    target.embedding.copy_(source.embedding)
    assert isinstance(target.lm_head, torch.Tensor) and isinstance(source.lm_head, torch.Tensor)
    target.lm_head.copy_(source.lm_head)
    assert target.norm is not None and source.norm is not None
    target.norm.weight.copy_(source.norm.weight)
    for theirs, ours in zip(source.layers, target.layers, strict=True):
        for name in ("input_norm", "post_norm", "qkv", "out", "up", "down"):
            getattr(ours, name).weight.copy_(getattr(theirs, name).weight)


def _compare_on_two_devices(ours: Driver, reference: Driver) -> None:
    rng = random.Random(4)
    for name in ("a", "b", "c"):
        prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, 200))]
        for driver in (ours, reference):
            driver.add(name, prompt)
    for _ in range(30):
        work = {name: ours.remaining(name) for name in ("a", "b", "c")}
        for name, found, expected in zip(work, ours.logits(**work), reference.logits(**work), strict=True):
            assert found is not None and expected is not None
            assert (found.cpu() - expected).abs().max() < 1e-3
            best = expected.topk(2)
            assert best.values[0] - best.values[1] < NEAR_TIE or found.argmax().item() == best.indices[0]
            for driver in (ours, reference):
                driver.sequences[name].token_ids.append(int(best.indices[0]))


def test_windows_and_heads_whose_size_is_no_power_of_two(tiny) -> None:
    shape = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 70, "head_dim": 96}
    config, weights = tiny(**shape)
    ours = Driver(make_runner(config, weights, "triton", graphs=True, max_rows=8))
    reference = Driver(make_runner(config, weights, "torch"))
    assert compare(ours, reference, 40, 0.25) > 40


@pytest.mark.parametrize("attention", KINDS)
def test_recorded_steps_are_computed_ones(tiny, attention: str) -> None:
    config, weights = tiny()
    ours = Driver(make_runner(config, weights, attention, graphs=True))
    reference = Driver(make_runner(config, weights, attention))
    assert compare(ours, reference, 40, 0.1) > 40


def test_compiled_layers_give_the_same(tiny) -> None:
    config, weights = tiny()
    ours = Driver(make_runner(config, weights, "triton", graphs=True, compiled=True, max_rows=4))
    reference = Driver(make_runner(config, weights, "triton"))
    assert compare(ours, reference, 20, 0.25) > 20


@kernels
def test_logits_of_a_7b_shape(attention: str, tmp_path: Path) -> None:
    """In bfloat16, against the torch backend: prompts in chunks and decode, over 32 layers."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory on the GPU")
    config = model_config("7b", tmp_path)
    weights = random_weights(config, torch.bfloat16, "cuda")
    ours = Driver(make_runner(config, weights, attention, graphs=True, max_rows=8, max_len=1024))
    reference = Driver(make_runner(config, weights, "torch", max_len=1024))
    assert compare(ours, reference, 12, 0.35, max_prompt=400) > 12


def test_the_sampler_draws_what_it_draws_on_the_cpu() -> None:
    """Weights have the same bits; sums of float64 are added up in another order, which no draw here notices."""
    rng = random.Random(1)
    params = [
        SamplingParams(
            1,
            temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 5, 40]),
            top_p=rng.choice([1.0, 0.9, 0.5]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.randrange(10**6),
        )
        for _ in range(2000)
    ]
    logits = 3 * torch.randn(len(params), 5003, generator=torch.Generator().manual_seed(0))
    positions = list(range(len(params)))
    sampler = DeviceSampler((), DeviceDraws(256, 5003, torch.device("cuda")))
    assert sampler.sample(logits.cuda(), params, positions) == NativeSampler().sample(logits, params, positions)


def test_a_row_without_a_token_is_found_as_on_the_cpu() -> None:
    """And the device computes on: no assertion has failed there."""
    logits = torch.randn(12, 1000, generator=torch.Generator().manual_seed(0))
    logits[1, 500] = torch.nan
    logits[3] = torch.nan
    logits[5, 0] = torch.inf
    logits[7] = -torch.inf
    sampler = DeviceSampler((), DeviceDraws(8, 1000, torch.device("cuda")))
    for temperature in (0.0, 1.0):
        params = [SamplingParams(1, temperature=temperature, seed=i, top_k=9, top_p=0.9) for i in range(12)]
        found = sampler.sample(logits.cuda(), params, range(12))
        assert [row for row, token in enumerate(found) if token == NO_TOKEN] == [1, 3, 5, 7]
        assert found == Sampler().sample(logits, params, range(12))
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_thousand_moves_without_corruption(tiny) -> None:
    """Offloads, uploads and preemptions while sequences run; every token is that of a run without any of them."""
    config, weights = tiny(torch.float32)
    runner = make_runner(config, weights, "torch", graphs=True)
    host = host_blocks(runner.pool, 96)
    cuda.pin(host)
    assert host.is_pinned()
    copier = StreamCopier(runner.pool, host, cuda.SideStream())
    undisturbed = Driver(make_runner(config, weights, "torch", graphs=True))
    events = wander(MovingDriver(runner, copier, 96), undisturbed, 1000)
    assert sum(events.values()) >= 1000
    assert min(events.values()) > 100


def test_no_growth_of_device_memory(tiny) -> None:
    """4,000 steps of all kinds; what is held after the first 400 is held at the end."""
    config, weights = tiny()
    runner = make_runner(config, weights, "triton", graphs=True)
    driver, backend = Driver(runner), runner.backend
    assert isinstance(backend, GraphBackend)
    rng = random.Random(3)
    names = [f"s{i}" for i in range(8)]
    held: list[int] = []
    used: list[int] = []
    for step in range(4_000):
        for name in names:
            if name in driver.sequences and len(driver.sequences[name].token_ids) > 400:
                driver.remove(name)
            if name not in driver.sequences:
                length = rng.randint(1, 200)
                prompt = [rng.randrange(3, 500) for _ in range(length)]
                driver.add(name, prompt, temperature=rng.choice((0.0, 1.0)), seed=step, top_p=0.9, logprobs=2)
        driver.step(**{name: min(driver.remaining(name), 64) for name in names if rng.random() < 0.8 or name == "s0"})
        if step == 399:
            backend.compiles.begin()
        if step % 400 == 399:
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)
    assert backend.compiles.names == []
    assert max(held) - min(held) < 2**20, held
    # What is not torch's: kernels that are loaded when they are first needed, and nothing that goes on growing.
    assert used[-1] - used[0] < 2**27 and used[-1] - used[-3] < 2**24, used


def test_out_of_memory(tmp_path: Path) -> None:
    """A step that does not fit is computed in parts, with the same tokens, and the device goes on."""
    config = model_config("tiny", tmp_path, vocab_size=65536)
    weights = random_weights(config, torch.float32, "cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    careful = CarefulSteps(cuda.recover)
    tokens: list[list[int | None]] = []
    for room in (None, 48 * 2**20):
        driver = Driver(make_runner(config, weights, "torch", max_len=64, num_blocks=300, careful=careful))
        for i in range(256):
            driver.add(f"s{i}", list(range(3 + i, 43 + i)))
        torch.cuda.empty_cache()
        if room is not None:
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        try:
            steps = [driver.step(**dict.fromkeys(driver.sequences, count)) for count in (40, 1, 1)]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert (careful.num_ooms > 0) == (room is not None)
        tokens.append([token for step in steps for token in step])
    agreeing = sum(a == b for a, b in zip(*tokens, strict=True))
    assert agreeing >= len(tokens[0]) - 6  # a near tie changes what follows


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_checkpoint_is_loaded_and_the_memory_shared_out(tmp_path: Path, bits: int) -> None:
    config = model_config("tiny", tmp_path)
    save_random_checkpoint(config, tmp_path, torch.bfloat16)
    engine = EngineConfig(device="cuda", max_num_seqs=16, max_batch_tokens=512, gpu_memory_utilization=0.5)
    device = load_gpu_device(tmp_path, config, "auto", engine, 1, swaps=True, bits=bits)
    assert isinstance(device.runner, ModelRunner)
    pool = device.runner.pool
    assert (pool.device.type, pool.dtype, pool.block_size) == ("cuda", torch.bfloat16, 64)
    assert 0 < device.num_blocks <= 16 * config.max_position_embeddings // 64  # a full batch of full-length sequences
    assert device.copier is not None
    driver = Driver(device.runner)
    driver.add("a", [5, 6, 7])
    assert [driver.step(a=3)[0], driver.step(a=1)[0]] != [None, None]


def test_the_pool_takes_what_is_left() -> None:
    """The pool fills the share to be used, less what a step takes at its peak and gives back."""
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    free = cuda.free_bytes(0.5, lambda: torch.empty(2**31, dtype=torch.uint8, device="cuda"))
    now, total = torch.cuda.mem_get_info()
    assert abs(free - (total // 2 - (total - now) - 2**31)) < 2**26
    assert len(held) == 2**30
