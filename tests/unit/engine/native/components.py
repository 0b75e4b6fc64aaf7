"""Models, and sequences that the compiled step computes in whatever portions; and its code for other processors."""

from __future__ import annotations

import ctypes
import platform
import random
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.core.request import Request, SamplingParams
from farsight.engine.attention.layout import order_items
from farsight.engine.native import library
from farsight.engine.sequence import Sequence
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import StepBatch, StepItem
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.small_models import SHAPES

BLOCK_SIZE = 16
ODD = {"hidden_size": 66, "intermediate_size": 90, "num_attention_heads": 3, "head_dim": 16}
MODELS = {
    **{
        name: SHAPES[name]
        for name in ("mha", "gqa", "mqa", "tied", "biases", "mistral", "qwen3", "phi3", "opt", "opt_gelu")
    },
    "odd": {**ODD, "num_key_value_heads": 1},
    "odd_mha": {**ODD, "num_key_value_heads": 3},
    "heads_of_20": {"head_dim": 20, "num_key_value_heads": 2},
    "experts": FAMILIES["qwen3 moe"],
    "shared_experts": FAMILIES["qwen2 moe"],
    "latents": FAMILIES["deepseek v3"],
    "long_window": {"architecture": "MistralForCausalLM", "num_key_value_heads": 2, "sliding_window": 140},
}

X86 = platform.machine() == "x86_64"
BUILDS = {
    "this processor": [*library.INSTRUCTIONS["native"]],
    **({name: [*library.INSTRUCTIONS[name], "-O1"] for name in ("avx2", "none")} if X86 else {}),
}
"""VPDPBUSD where there is VNNI, VPMADDUBSW and VPMADDWD, plain C++."""
NIGHTLY_BUILDS = {
    name: [*library.INSTRUCTIONS[name], "-O1"]
    for name, needed in {"ssse3": "ssse3", "avx2-vnni": "avx_vnni", "avx512": "avx512bw"}.items()
    if needed in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
}
"""Further ones that this processor can run."""


def compiled_probe(source: str, build: str, folder: Path) -> ctypes.CDLL:
    """A file of this folder and the headers of the compiled step, for one of ``BUILDS`` or ``NIGHTLY_BUILDS``."""
    path, headers = folder / "probe.so", Path(library.__file__).parent
    flags = [flag for flag in library.COMPILE_FLAGS if not flag.startswith("-march")]
    flags += (BUILDS | NIGHTLY_BUILDS)[build]
    file = Path(__file__).with_name(source)
    subprocess.run(["c++", *flags, "-I", headers, "-shared", "-fPIC", file, "-o", path], check=True)
    return ctypes.CDLL(str(path))


class Components:
    """Sequences of known tokens, computed in whatever portions; every row's logits are kept.

    Args:
        seed: Decides the places of the blocks and the cuts.
        spare: Blocks beyond those that are needed: the context's length, so the table of angles, is another too.
        how: As ``ModelRunner.from_dir`` takes it.
    """

    def __init__(self, model: Path, dtype: str, tokens: list[list[int]], seed: int, spare: int = 0, **how: Any) -> None:
        self._rng = random.Random(seed)
        self._sequences = {str(i): _sequence(str(i), ids) for i, ids in enumerate(tokens)}
        num_blocks = sum(-(-len(ids) // BLOCK_SIZE) for ids in tokens) + spare
        where: dict[str, Any] = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "backend": "native"}
        self.runner = ModelRunner.from_dir(model, dtype=getattr(torch, dtype), **where, **how)
        for cache in (*self.runner.pool.keys, *self.runner.pool.values):
            cache.view(torch.uint8).fill_(255)  # NaN, also as scales of integers
        free = list(range(num_blocks))
        self._rng.shuffle(free)
        self.tables = {
            name: [free.pop() for _ in range(-(-len(sequence.token_ids) // BLOCK_SIZE))]
            for name, sequence in self._sequences.items()
        }
        self.done = dict.fromkeys(self._sequences, 0)
        self.logits: dict[str, list[Tensor]] = {name: [] for name in self._sequences}

    def left(self, name: str) -> int:
        return len(self._sequences[name].token_ids) - self.done[name]

    def step(self, work: dict[str, int], *, every_row: bool = True) -> None:
        """The next so many tokens of each.

        Args:
            every_row: Whether the logits of all rows are wanted, or only those of each sequence's last token.
        """
        items = tuple(
            StepItem(name, self.done[name], count, self.left(name) == count, self.tables[name])
            for name, count in work.items()
        )
        batch = StepBatch(items)
        order = order_items(batch)
        owners = [items[i].request_id for i in order for _ in range(items[i].num_tokens)]
        sampling = {sum(items[j].num_tokens for j in order[: place + 1]) - 1: i for place, i in enumerate(order)}
        more = [row for row in range(len(owners)) if row not in sampling or not items[sampling[row]].samples]
        if not every_row:
            owners = [items[i].request_id for i in order if items[i].samples]
        logits = self.runner.backend.run(batch, order, self._sequences, more if every_row else None).logits
        for name, row in zip(owners, logits.clone(), strict=True):
            self.logits[name].append(row)
        for name, count in work.items():
            self.done[name] += count

    def run_alone(self) -> Components:
        """One token at a time, one sequence after the other."""
        for name in self._sequences:
            while self.left(name):
                self.step({name: 1})
        return self

    def run(self, most_at_once: int, chunk: int) -> Components:
        """Steps of so many sequences at most, each with one token or a chunk of the size given."""
        while names := [name for name in self._sequences if self.left(name)]:
            chosen = self._rng.sample(names, min(self._rng.randint(1, most_at_once), len(names)))
            self.step({name: min(self._rng.choice((1, chunk, chunk)), self.left(name)) for name in chosen})
        return self

    def kv(self, name: str) -> list[Tensor]:
        """Keys and values of all layers by position, ``[tokens, kv_heads, head_dim]``; in 8 bits the integers, then the
        scales ``[tokens, kv_heads]``. The layouts are in kv_plain.h, kv_int8.h and kv_latent.h.
        """
        pool, num_tokens = self.runner.pool, len(self._sequences[name].token_ids)
        if self.runner.config.latent is not None:
            of_blocks = [cache.view(pool.num_blocks, BLOCK_SIZE, -1)[self.tables[name]] for cache in pool.keys]
            return [rows.flatten(0, 1)[:num_tokens] for rows in of_blocks]
        head_dim = self.runner.config.head_dim
        per_lane = 1 if pool.dtype == torch.float32 else 2
        found, scales = [], []
        for is_key, cache in [(True, each) for each in pool.keys] + [(False, each) for each in pool.values]:
            kv_heads = cache.shape[1]
            blocks = cache.reshape(pool.num_blocks, kv_heads, -1)[self.tables[name]]
            if pool.dtype == torch.int8:
                of_scales = blocks[..., BLOCK_SIZE * head_dim :].contiguous().view(torch.float32)
                scales.append(of_scales.transpose(1, 2).reshape(-1, kv_heads)[:num_tokens])
                blocks = blocks[..., : BLOCK_SIZE * head_dim]
            if is_key:
                parts = blocks.reshape(len(blocks), kv_heads, head_dim // per_lane, BLOCK_SIZE, per_lane)
                parts = parts.permute(0, 3, 1, 2, 4)
            else:
                parts = blocks.reshape(len(blocks), kv_heads, BLOCK_SIZE // per_lane, head_dim, per_lane)
                parts = parts.permute(0, 2, 4, 1, 3)
            found.append(parts.reshape(-1, kv_heads, head_dim)[:num_tokens])
        return [*found, *scales]


def _sequence(name: str, token_ids: list[int]) -> Sequence:
    return Sequence.of(Request(name, 1, "ingress", tuple(token_ids), SamplingParams(1)))


def random_tokens(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]


def assert_same(ours: Components, alone: Components) -> None:
    """The sequences of ``ours`` are the first ones of ``alone``, or all of them."""
    for name, found in ours.logits.items():
        assert torch.equal(torch.stack(found), torch.stack(alone.logits[name])), f"logits of sequence {name}"
        for mine, theirs in zip(ours.kv(name), alone.kv(name), strict=True):
            assert torch.equal(mine, theirs), f"keys or values of sequence {name}"
