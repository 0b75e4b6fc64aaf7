"""What our kernels take on a Hopper GPU, compiled without one: ``python -m benchmarks.gpu_kernels``.

Registers of a thread, bytes that spill, shared memory of a program: of attention for each size of heads, plain and with
everything that a model may ask for; of drawing tokens. The exit status is 1 if anything spills or does not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.common.stand_in_gpu import MOST_SHARED, Compiled, PoolShape, compiling, resources
from farsight.engine.attention.attention import PLAIN_SCORES, ScoreShape, alibi_slopes
from farsight.engine.attention.triton_attention import TritonAttention
from farsight.engine.kv_pool import KVPool
from farsight.engine.sampling.device_draws import DeviceDraws
from farsight.services.bench.report import markdown_table

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
GROUPS = (1, 4, 16)
KV_HEADS = 2
VOCAB = 151936


def compiled(head_dim: int, group: int, *, plain: bool, page: int = 64) -> list[Compiled]:
    """Compiles the kernels of a model whose heads are of that size, ``group`` of them for each KV head."""
    heads = group * KV_HEADS
    pool = KVPool(PoolShape(head_dim, KV_HEADS), num_blocks=1, block_size=page, dtype=torch.bfloat16)  # type: ignore[arg-type]
    scores = PLAIN_SCORES if plain else ScoreShape(cap=50.0, slopes=alibi_slopes(heads))
    with compiling() as found:
        TritonAttention(heads, (None if plain else 1024,), pool, 1, scores, sinks=not plain)
    return [resources(kernel) for kernel in found]


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
    return int(not all(fits for _, fits in made))


if __name__ == "__main__":
    sys.exit(main())
