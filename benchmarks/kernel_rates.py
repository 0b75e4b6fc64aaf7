"""What the compiled step's products make of this machine: ``python -m benchmarks.kernel_rates [--shape NAME]``.

For each format of weights and number of rows: how fast the matrices of a decoder of that shape are multiplied, in
GFLOP/s beside torch's product in float32, and in GB/s of weights beside a plain read of more than the caches hold, with
as many threads. A decode step has logits for every row, a prefill for none. Steps of 256 rows and more go through one
layer. All by turns; the least time counts, so that the ratios hold on a machine that does other work as well.

``--model`` runs whole steps of a checkpoint with weights of each kind beside each other. ``--instructions`` builds both
for an older processor, and keeps torch to it as well (by MKL's and torch's own variables, read when they are loaded).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.kernels.model_steps import Steps, compared_steps
from benchmarks.kernels.products import FORMATS, SHAPES, Machine, Products
from farsight.core.config.engine import KV_DTYPES, WEIGHTS
from farsight.engine.native import library
from farsight.services.bench.report import markdown_table, provenance, write_json

TORCH_LIMITS = {"avx2": ("AVX2", "avx2"), "ssse3": ("SSE4_2", "default"), "none": ("SSE4_2", "default")}
"""By instruction set: ``MKL_ENABLE_INSTRUCTIONS`` and ``ATEN_CPU_CAPABILITY``."""

MANY_ROWS = 256
REPEATED_FOR_S = 0.02


def measured_format(
    machine: Machine, products: Products, layers: int, cases: list[tuple[str, int]], rounds: int
) -> dict[str, Any]:
    """Returns by case the rates, and those of the machine that were measured between them."""
    least: dict[str, float] = {}
    read = sgemm = 0.0
    for _ in range(rounds):
        read, sgemm = max(read, machine.read_rate()), max(sgemm, machine.sgemm_rate())
        for name, rows in cases:
            sizes = _sizes(name, rows, layers)
            left = REPEATED_FOR_S
            while left > 0:
                took = machine.seconds(lambda sizes=sizes: products.run(*sizes))  # type: ignore[misc]
                least[name] = min(least.get(name, took), took)
                left -= max(took, 1e-4)
    found = {}
    for name, rows in cases:
        flops, num_bytes = products.work(*_sizes(name, rows, layers))
        found[name] = {
            "seconds": least[name],
            "gflops": flops / least[name] / 1e9,
            "of_sgemm": flops / least[name] / sgemm,
            "gbytes": num_bytes / least[name] / 1e9,
            "of_read": num_bytes / least[name] / read,
        }
    return {"cases": found, "sgemm_gflops": sgemm / 1e9, "read_gbytes": read / 1e9}


def _sizes(name: str, rows: int, layers: int) -> tuple[int, int, int]:
    """Returns rows, those with logits, and layers."""
    return rows, rows if name.startswith("decode") else 0, layers if rows < MANY_ROWS else 1


def measured_shape(machine: Machine, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Prints two tables of a shape."""
    shape = SHAPES[name]
    cases = [(f"decode {rows}", rows) for rows in args.rows] + [(f"prefill {rows}", rows) for rows in args.prefill]
    found = {}
    for format_name in args.formats:
        if all(FORMATS[format_name].fits(inputs) for _, inputs in shape.layer):
            most = max(rows for _, rows in cases)
            products = Products(machine, shape, FORMATS[format_name], args.layers, most)
            found[format_name] = measured_format(machine, products, args.layers, cases, args.rounds)
    for unit, ratio, of in (("gflops", "of_sgemm", "sgemm"), ("gbytes", "of_read", "read")):
        rows = [
            [each, *(f"{cell[unit]:.3g} ({cell[ratio]:.2f})" for cell in record["cases"].values())]
            for each, record in found.items()
        ]
        print(markdown_table([f"{name}, {unit}/s (of the machine's {of})", *(each for each, _ in cases)], rows) + "\n")
    print(f"sgemm {max(each['sgemm_gflops'] for each in found.values()):.0f} GFLOP/s, ", end="")
    print(f"read {max(each['read_gbytes'] for each in found.values()):.1f} GB/s\n")
    return found


def main() -> None:
    """Prints the tables."""
    args = _parse()
    if args.instructions != "native":
        limits = dict(zip(("MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"), _limits(args.instructions), strict=True))
        if limits.items() - os.environ.items():  # torch has read them already
            os.execve(sys.executable, [*sys.orig_argv], os.environ | limits)
        library.COMPILE_FLAGS[:1] = library.INSTRUCTIONS[args.instructions]
    record: dict[str, Any] = {}
    if not args.model or args.shape:
        clock = time.process_time if args.processor_time else time.perf_counter
        machine = Machine(args.threads, clock, args.read_bytes)
        record["shapes"] = {name: measured_shape(machine, name, args) for name in args.shape or ["smollm2-135m"]}
    for model in args.model:
        prompt = max(args.prefill)
        models = {
            kind: Steps(model, kind, args.dtype, args.threads, max(args.rows), prompt, args.kv_dtype)
            for kind in args.weights
        }
        table, seconds = compared_steps(models, args.rows, args.prefill, args.rounds)
        print(f"{model}\n\n{table}\n")
        record.setdefault("seconds", {})[str(model)] = seconds
    write_json(args.json, {**provenance(["python", "-m", "benchmarks.kernel_rates"]), **record})


def _limits(instructions: str) -> tuple[str, str]:
    known = next((limits for start, limits in TORCH_LIMITS.items() if instructions.startswith(start)), None)
    return known or ("AVX512", "avx512")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=[])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--model", type=Path, nargs="+", default=[])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS[1:], default=WEIGHTS[1:])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--prefill", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8, help="of a decode step")
    parser.add_argument("--read-bytes", type=int, default=0, help="read to find the memory's rate [twice the caches]")
    parser.add_argument("--processor-time", action="store_true", help="on a machine that does other work as well")
    parser.add_argument("--instructions", choices=library.INSTRUCTIONS, default="native")
    parser.add_argument("--json", type=Path, help="write every number here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
