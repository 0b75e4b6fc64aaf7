"""Speed of the engine on a GPU beside what the GPU can do: ``python -m benchmarks.gpu_engine``.

Random weights: speed does not depend on what they are. Everything is measured in the same run, limits included:

- bandwidth: a large copy within the device, bytes read plus bytes written;
- matrix products: a large square one in the model's dtype;
- link: a large copy from pinned host memory to the device, and back.

A decode step reads all weights and the KV of its sequences once, so it cannot be quicker than those bytes over the
bandwidth; prefill cannot be quicker than its multiplications over the rate of the matrix product. Steps that mix rows
and chunks, short prompts and steps that sample are shown with the time that kernels took of them: the rest is the
host's. ``--device cpu --shape tiny`` runs the same with other numbers, to test the script.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.common.gpu_models import SHAPES, model_config, random_weights
from farsight.core.request import Request, Residency, SamplingParams
from farsight.engine import cuda
from farsight.engine.attention.attention import AttentionBackend
from farsight.engine.attention.choice import gpu_attention
from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.names import num_parameters
from farsight.engine.devices.copiers import StreamCopier, host_blocks
from farsight.engine.kv_pool import KVPool
from farsight.engine.sequence import Sequence
from farsight.engine.steps.backends import GraphBackend
from farsight.engine.steps.model_runner import ModelRunner
from farsight.engine.steps.recording import Capture
from farsight.kvcache import KVCopy, StepBatch, StepItem
from farsight.services.bench.report import markdown_table, provenance, write_json

BLOCK = 64

_GREEDY = SamplingParams(1)

SECTIONS = ("decode", "prefill", "steps", "swap")
"""Lists of measurements in a record, in the order in which they are made."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured.

    Attributes:
        context: Tokens that a decode row attends over.
        prompt: Tokens of a prompt.
        size: Rows of the square matrices.
        copy_bytes: Bytes of the copy within the device; a quarter of them go over the link.
        blocks: KV blocks that are offloaded and uploaded at once.
        repeats: Repeats of each measurement; the median counts.
    """

    batch_sizes: tuple[int, ...]
    context: int
    prompt: int
    size: int
    copy_bytes: int
    blocks: int
    repeats: int


SIZES = {
    "tiny": Sizes((1, 4), context=64, prompt=64, size=256, copy_bytes=2**20, blocks=4, repeats=1),
    "7b": Sizes((1, 16, 64, 256), context=1024, prompt=1024, size=8192, copy_bytes=2**32, blocks=64, repeats=10),
}
"""By shape of the model."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the machine: bytes per second, and floating-point operations per second."""

    bandwidth: float
    matmul: float
    to_device: float
    to_host: float


class Clock:
    """Times work on a device: with events where there are any.

    Args:
        repeats: Repeats, of which the median counts, after some that do not count.
    """

    def __init__(self, device: str, repeats: int) -> None:
        self._on_gpu = device == "cuda"
        self._repeats = repeats

    def median_s(self, work: Callable[[], object]) -> float:
        for _ in range(min(3, self._repeats)):
            work()
        return statistics.median(self._once_s(work) for _ in range(self._repeats))

    def wall_s(self, work: Callable[[], object]) -> float:
        """Seconds of work that waits for its own end."""

        def timed() -> float:
            began_at = time.perf_counter()
            work()
            return time.perf_counter() - began_at

        for _ in range(min(3, self._repeats)):
            work()
        return statistics.median(timed() for _ in range(self._repeats))

    def _once_s(self, work: Callable[[], object]) -> float:
        if not self._on_gpu:
            began_at = time.perf_counter()
            work()
            return time.perf_counter() - began_at
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


class HostStream:
    """Stands for a side stream where there is none."""

    def after_steps(self) -> nullcontext[None]:
        return nullcontext()

    def mark(self) -> Callable[[], None]:
        return lambda: None


def measure_limits(device: str, dtype: torch.dtype, sizes: Sizes, clock: Clock) -> Limits:
    bandwidth = _bandwidth(device, sizes, clock)
    left, right = (torch.randn(sizes.size, sizes.size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    matmul = 2 * sizes.size**3 / clock.median_s(lambda: torch.mm(left, right, out=product))
    host = torch.randn(sizes.copy_bytes // 16)
    if device == "cuda":
        cuda.pin(host)
    there = torch.empty_like(host, device=device)
    num_bytes = host.numel() * 4
    to_device = num_bytes / clock.median_s(lambda: there.copy_(host, non_blocking=True))
    to_host = num_bytes / clock.median_s(lambda: host.copy_(there, non_blocking=True))
    return Limits(bandwidth, matmul, to_device, to_host)


def _bandwidth(device: str, sizes: Sizes, clock: Clock) -> float:
    source = torch.randn(sizes.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / clock.median_s(lambda: target.copy_(source))


class EngineBench:
    """A model with random weights, and steps to run on it.

    Args:
        compiled: As ``engine.compile``.
    """

    def __init__(
        self, config: DecoderConfig, device: str, dtype: torch.dtype, sizes: Sizes, *, compiled: bool = False
    ) -> None:
        self.config = config
        self._sizes = sizes
        self._clock = Clock(device, sizes.repeats)
        weights = random_weights(config, dtype, device)
        self.weight_bytes = num_parameters(config) * dtype.itemsize
        self.token_bytes = config.kv_bytes_per_token(dtype)
        per_sequence = -(-max(sizes.context + 64, sizes.prompt) // BLOCK)
        num_blocks = max(sizes.batch_sizes) * per_sequence + sizes.blocks
        self.pool = KVPool(config, num_blocks=num_blocks, block_size=BLOCK, dtype=dtype, device=device, spare=True)
        for cache in (*self.pool.keys, *self.pool.values):
            cache.normal_()
        max_len = per_sequence * BLOCK
        recorded = StepSizes(max(sizes.batch_sizes), per_sequence, 4 * sizes.prompt)
        attention: AttentionBackend = TorchAttention(config.sliding_windows)
        capture = cast(Capture, lambda run: run)  # what is not recorded is run as it is
        synchronize: Callable[[], object] = lambda: None  # noqa: E731
        if device == "cuda":
            attention, capture = gpu_attention("auto", config, self.pool, recorded), cuda.Graphs()
            synchronize = cuda.synchronize
        backend = self.backend = GraphBackend(
            config, weights, self.pool, max_len, attention, recorded, capture, synchronize, compiled=compiled
        )
        self.runner = ModelRunner(config, self.pool, backend, max_len)
        self.attention = type(attention).__name__

    def decode(self, num_rows: int, limits: Limits) -> dict[str, float]:
        """Tokens per second of a step of so many sequences, wall time; the share of the bandwidth limit."""
        sizes = self._sizes
        batch, sequences = self._batch([(sizes.context - 1, 1)] * num_rows)
        step_s = self._clock.wall_s(lambda: self.runner.execute(batch, sequences))
        # The embedding is looked up, not read.
        embedding = self.config.vocab_size * self.config.hidden_size * self.pool.dtype.itemsize
        num_bytes = self.weight_bytes - embedding + num_rows * sizes.context * self.token_bytes
        limit_s = num_bytes / limits.bandwidth
        return {
            "sequences": num_rows,
            "step ms": step_s * 1e3,
            "tokens/s": num_rows / step_s,
            "limit tokens/s": num_rows / limit_s,
            "share of limit %": 100 * limit_s / step_s,
        }

    def prefill(self, num_prompts: int, limits: Limits) -> dict[str, float]:
        """Tokens per second of a step of so many whole prompts; the share of the matrix products' rate."""
        length = self._sizes.prompt
        batch, sequences = self._batch([(0, length)] * num_prompts)
        step_s = self._clock.wall_s(lambda: self.runner.execute(batch, sequences))
        config, tokens = self.config, num_prompts * length
        embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        matrices = 2 * (num_parameters(config) - embeddings) * tokens
        head = 2 * config.vocab_size * config.hidden_size * num_prompts
        # Causal: half of the pairs; scores, then values.
        pairs = num_prompts * length * (length + 1) / 2
        attention = 4 * pairs * config.num_attention_heads * config.head_dim * config.num_hidden_layers
        rate = (matrices + head + attention) / step_s
        return {
            "prompts": num_prompts,
            "tokens": tokens,
            "step ms": step_s * 1e3,
            "tokens/s": tokens / step_s,
            "TFLOP/s": rate / 1e12,
            "share of matmul %": 100 * rate / limits.matmul,
        }

    def kinds_of_steps(self) -> dict[str, tuple[list[tuple[int, int]], SamplingParams]]:
        """Lists steps that are neither rows nor prompts alone, and steps that sample: their parts as of ``_batch``."""
        row = (self._sizes.context - 1, 1)
        chunk, some = self._sizes.prompt // 2, min(32, max(self._sizes.batch_sizes) - 1)
        return {
            f"{some} rows and a prompt of {chunk}": ([row] * some + [(0, chunk)], _GREEDY),
            f"{some} rows and a chunk of {chunk} behind {chunk}": ([row] * some + [(chunk, chunk)], _GREEDY),
            "a prompt of 64": ([(0, 64)], _GREEDY),
            f"{some} rows, T=1": ([row] * some, SamplingParams(1, temperature=1.0)),
            f"{some} rows, T=1, top_p=0.9": ([row] * some, SamplingParams(1, temperature=1.0, top_p=0.9)),
        }

    def step(self, name: str) -> dict[str, object]:
        """Measures a step of ``kinds_of_steps``: wall time, and what kernels took of it; without a GPU all of it."""
        batch, sequences = self._batch(*self.kinds_of_steps()[name])
        step_ms = self._clock.wall_s(lambda: self.runner.execute(batch, sequences)) * 1e3
        kernels_ms = step_ms
        if self.pool.device.type == "cuda":
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as found:
                self.runner.execute(batch, sequences)
                cuda.synchronize()
            kernels_ms = sum(event.self_device_time_total for event in found.key_averages()) / 1e3
        return {"step": name, "step ms": step_ms, "kernels ms": kernels_ms, "idle %": 100 * (1 - kernels_ms / step_ms)}

    def swap(self, limits: Limits) -> dict[str, float]:
        """Bytes per second of offload and upload, the share of the link's, and how far both hide behind steps."""
        num_blocks = self._sizes.blocks
        host = host_blocks(self.pool, num_blocks)
        on_gpu = self.pool.device.type == "cuda"
        if on_gpu:
            cuda.pin(host)
        copier = StreamCopier(self.pool, host, cuda.SideStream() if on_gpu else HostStream())
        end = self.pool.num_slots // BLOCK
        ours, theirs = tuple(range(end - num_blocks, end)), tuple(range(num_blocks))
        orders = {Residency.HOST: (ours, theirs), Residency.DEVICE: (theirs, ours)}

        def begin(to: Residency) -> None:
            copier.begin(KVCopy(0, to, *orders[to]))

        def finish() -> None:
            while not copier.take_done():
                copier.wait()

        def move(to: Residency) -> None:
            begin(to)
            finish()

        num_bytes = num_blocks * BLOCK * self.token_bytes
        there_s, back_s = (self._clock.wall_s(lambda to=to: move(to)) for to in orders)  # type: ignore[misc]
        batch, sequences = self._batch([(self._sizes.context - 1, 1)] * min(16, max(self._sizes.batch_sizes)))
        steps_s = self._clock.wall_s(lambda: self.runner.execute(batch, sequences))
        num_steps = max(1, round(there_s / steps_s))

        def steps() -> None:
            for _ in range(num_steps):
                self.runner.execute(batch, sequences)

        def both() -> None:
            begin(Residency.HOST)
            steps()
            finish()

        alone_s, both_s = self._clock.wall_s(steps), self._clock.wall_s(both)
        return {
            "MiB": num_bytes / 2**20,
            "offload GB/s": num_bytes / there_s / 1e9,
            "of the link %": 100 * num_bytes / there_s / limits.to_host,
            "upload GB/s": num_bytes / back_s / 1e9,
            "of the link, up %": 100 * num_bytes / back_s / limits.to_device,
            # 100: the two together take as long as the longer one alone; 0: as long as one after the other.
            "overlap %": 100 * (alone_s + there_s - both_s) / min(alone_s, there_s),
        }

    def _batch(
        self, parts: list[tuple[int, int]], sampling: SamplingParams = _GREEDY
    ) -> tuple[StepBatch, dict[str, Sequence]]:
        """Makes a step; its parts are the tokens computed before and those of the step, of a sequence each."""
        items, sequences, taken = [], {}, 0
        for i, (start, num_tokens) in enumerate(parts):
            used = -(-(start + num_tokens) // BLOCK)
            name, ids = f"s{i}", tuple(3 + j % 500 for j in range(start + num_tokens))
            items.append(StepItem(name, start, num_tokens, True, list(range(taken, taken + used))))
            sequences[name] = Sequence.of(Request(name, 0, "", ids, sampling))
            taken += used
        return StepBatch(tuple(items)), sequences


Record = dict[str, Any]


def run(device: str, shape: str, *, compiled: bool = False, tell: Callable[[Record], None] | None = None) -> Record:
    """Everything; a record of numbers.

    Args:
        tell: Is shown the record after each measurement.
    """
    dtype, sizes = torch.bfloat16, SIZES[shape]
    with tempfile.TemporaryDirectory() as directory:
        config = model_config(shape, Path(directory))
    limits = measure_limits(device, dtype, sizes, Clock(device, sizes.repeats))
    record: Record = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "shape": shape,
        "parameters": num_parameters(config),
        "limits": asdict(limits),
        **{name: [] for name in SECTIONS},
    }
    tell = tell or (lambda record: None)
    tell(record)
    began_at = time.perf_counter()
    bench = EngineBench(config, device, dtype, sizes, compiled=compiled)
    record |= {"attention": bench.attention, "ready after s": time.perf_counter() - began_at, "compiles": 0}
    bench.backend.compiles.begin()
    tell(record)
    measurements: list[tuple[str, Callable[[], Mapping[str, object]]]] = [
        *(("decode", lambda rows=rows: bench.decode(rows, limits)) for rows in sizes.batch_sizes),
        *(("prefill", lambda num=num: bench.prefill(num, limits)) for num in (1, 4) if num <= max(sizes.batch_sizes)),
        *(("steps", lambda name=name: bench.step(name)) for name in bench.kinds_of_steps()),
        ("swap", lambda: bench.swap(limits)),
    ]
    for name, measure in measurements:
        record[name].append(measure())
        record["compiles"] = bench.backend.compiles.num_compiles
        tell(record)
    return record


def tables(record: Record) -> str:
    """The record for people, as far as it goes."""
    limits = record["limits"]
    parts = [
        f"{record['device']}, {record['shape']} ({record['parameters'] / 1e9:.2f} billion parameters, bfloat16), "
        f"{record.get('attention', 'not ready')}: memory {limits['bandwidth'] / 1e9:.0f} GB/s, matrix products "
        f"{limits['matmul'] / 1e12:.1f} TFLOP/s, link {limits['to_device'] / 1e9:.1f} GB/s up and "
        f"{limits['to_host'] / 1e9:.1f} GB/s down, all measured in this run"
    ]
    for name in SECTIONS:
        rows = record[name]
        if rows:
            cells = [[_cell(value) for value in row.values()] for row in rows]
            parts.append(f"{name}\n\n{markdown_table(list(rows[0]), cells)}")
    return "\n\n".join(parts)


def _cell(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", default="7b", choices=list(SHAPES))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    arguments = parser.parse_args()
    origin = provenance(["python", "-m", "benchmarks.gpu_engine"])
    print(origin["versions"], flush=True)

    def tell(record: Record) -> None:
        print(_newest(record), flush=True)
        write_json(arguments.json, {**origin, **record})

    record = run(arguments.device, arguments.shape, compiled=arguments.compile, tell=tell)
    print(f"\n{tables(record)}")


def _newest(record: Record) -> str:
    """What was measured last, in a line."""
    for name in reversed(SECTIONS):
        if record[name]:
            return f"{name}: " + ", ".join(f"{key} {_cell(value)}" for key, value in record[name][-1].items())
    return ", ".join(f"{key} {_cell(value)}" for key, value in record.items() if key not in SECTIONS)


if __name__ == "__main__":
    main()
