"""What the kernels take on a Hopper GPU, compiled without one: ``python -m benchmarks.gpu_kernels``.

Those of attention for each size of heads, plain and with everything that a model may ask for; those between the matrix
products, and the products of experts, with everything; those of drawing tokens. For each: registers of a thread, bytes
that spill, shared memory of a program. The exit status is 1 if anything spills or does not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.common.stand_in_gpu import MOST_SHARED, Compiled, PoolShape, compiling, resources
from farsight.engine.attention.attention import PLAIN_SCORES, ScoreShape, alibi_slopes
from farsight.engine.attention.triton_attention import TritonAttention
from farsight.engine.checkpoint.families.record import ClampedGate
from farsight.engine.checkpoint.layers import Linear, Norm
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.fused import add_norm, gated, rotate_and_store
from farsight.engine.models.grouped import GroupedExperts
from farsight.engine.sampling.device_draws import DeviceDraws
from farsight.services.bench.report import markdown_table

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
GROUPS = (1, 4, 16)
HIDDEN_SIZES = (2048, 4096, 8192, 16384)
KV_HEADS = 2
VOCAB = 151936
LATENT_ROW, LATENT_HEADS = 576, (16, 128)
"""Values of a row of DeepSeek's latent attention; its heads in V2-Lite and in V2 and V3."""


def compiled(head_dim: int, group: int, *, plain: bool, page: int = 64) -> list[Compiled]:
    """Compiles the kernels of a model whose heads are of that size, ``group`` of them for each KV head."""
    heads = group * KV_HEADS
    pool = KVPool(PoolShape(head_dim, KV_HEADS), num_blocks=1, block_size=page, dtype=torch.bfloat16)  # type: ignore[arg-type]
    scores = PLAIN_SCORES if plain else ScoreShape(cap=50.0, slopes=alibi_slopes(heads))
    with compiling() as found:
        TritonAttention(heads, (None if plain else 1024,), pool, 1, scores, sinks=not plain)
    return [resources(kernel) for kernel in found]


def compiled_latent(heads: int, page: int = 64) -> list[Compiled]:
    """Compiles attention of so many heads over the one row that latent attention keeps of a token."""
    pool = KVPool(PoolShape(LATENT_ROW, 1, kv_rows=1), num_blocks=1, block_size=page, dtype=torch.bfloat16)  # type: ignore[arg-type]
    with compiling() as found:
        TritonAttention(heads, (None,), pool, 1, ScoreShape(scale=0.1))
    return [resources(kernel) for kernel in found]


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def compiled_norm(size: int) -> list[Compiled]:
    """Compiles LayerNorm and RMSNorm of rows of that size, each behind a norm of what is added."""
    weight = torch.empty(size)  # what an offset is added to is kept in float32
    with compiling() as found:
        for layer, norm in ((True, Norm(weight, weight)), (False, Norm(weight, None))):
            add_norm(_empty(2, size), _empty(2, size), norm, 1e-5, after=norm, factor=0.5, layer=layer)
    return [resources(kernel) for kernel in found]


def compiled_heads(head_dim: int) -> list[Compiled]:
    """Compiles what norms and turns heads, and writes them into the pool."""
    pages, table, places = (
        _empty(16, KV_HEADS, head_dim),
        _empty(16, 1, head_dim // 2),
        torch.zeros(2, dtype=torch.int64),
    )
    heads, norms = _empty(2, 5 * KV_HEADS, head_dim), _empty(2, head_dim)
    with compiling() as found:
        rotate_and_store(heads, heads[:, :KV_HEADS], (table, table), places, places, (pages, pages), norms, 1e-5)
    return [resources(kernel) for kernel in found]


def compiled_mlp(size: int = 1024, experts: int = 2) -> list[Compiled]:
    """Compiles activations, and experts' products with biases: of few pairs of token and expert, and of many."""
    up = tuple(Linear(_empty(2 * size, size), _empty(2 * size)) for _ in range(experts))
    down = tuple(Linear(_empty(size, size), _empty(size)) for _ in range(experts))
    with compiling() as found:
        for activation in ("silu", "gelu", "gelu_tanh"):
            gated(_empty(2, 2 * size), activation)
        gated(_empty(2, 2 * size), clamp=ClampedGate(1.7, 7.0))
        for tokens in (2, 100):
            chosen = torch.zeros(tokens, 2, dtype=torch.int64)
            GroupedExperts(up, down).mixed(_empty(tokens, size), chosen, torch.ones(tokens, 2), gated)
    return [resources(kernel) for kernel in found]


def layer_rows() -> Iterator[tuple[list[str], bool]]:
    """Yields rows of the table of kernels beside attention, likewise."""
    made = [(f"hidden {size}", compiled_norm(size)) for size in HIDDEN_SIZES]
    made += [(f"head dim {size}", compiled_heads(size)) for size in (*HEAD_DIMS, LATENT_ROW)]
    made.append(("experts", compiled_mlp()))
    made += [(f"latent, {heads} heads", compiled_latent(heads)) for heads in LATENT_HEADS]
    for what, kernels in made:
        for each in kernels:
            cells = [what, each.name, each.warps, each.registers, each.spilled, each.shared]
            yield [str(cell) for cell in cells], not each.spilled and each.shared <= MOST_SHARED


def rows(head_dims: Sequence[int], groups: Sequence[int]) -> Iterator[tuple[list[str], bool]]:
    """Yields rows of the table, each with whether its kernel fits without spilling."""
    for head_dim in head_dims:
        for group in groups:
            for plain in (True, False):
                for index, each in enumerate(compiled(head_dim, group, plain=plain)):
                    kernel = ("rows", "rows, added up", "chunks")[index]
                    yield _row((head_dim, group, "plain" if plain else "all", kernel), each)
    with compiling() as found:
        DeviceDraws(1, VOCAB, torch.device("cpu"))
    yield _row(("", "", "", f"draws of {VOCAB:,} tokens"), resources(found[0]))


def _row(names: tuple[object, ...], each: Compiled) -> tuple[list[str], bool]:
    fits = not each.spilled and each.shared <= MOST_SHARED
    return [str(cell) for cell in (*names, each.warps, each.registers, each.spilled, each.shared)], fits


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--group", type=int, nargs="+", default=GROUPS)
    arguments = parser.parse_args()
    made = list(rows(arguments.head_dim, arguments.group))
    names = ["head dim", "group", "scores", "kernel", "warps", "registers", "spilled", "shared"]
    print(markdown_table(names, [cells for cells, _ in made]))
    layers = list(layer_rows())
    print()
    print(markdown_table(["size", *names[3:]], [cells for cells, _ in layers]))
    return int(not all(fits for _, fits in made + layers))


if __name__ == "__main__":
    sys.exit(main())
