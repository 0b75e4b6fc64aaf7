"""Presets side by side on a model that computes: ``python -m benchmarks.real_presets run --model DIR --out DIR``.

Open loop at ``--loads`` times the capacity of the first system, gaps with a coefficient of variation of 2, the
requests ``hol`` of ``farsight bench`` or the texts of eight tasks with their real lengths, which are hidden from the
schedulers. All servers run on this machine, each idles while another works. Each cell (workload, load, seed) is written
when it is done, so a comparison can be made in parts; ``python -m benchmarks.real_presets table --out DIR`` puts
together what there is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.real_presets.cells import WORKLOADS, Bench, System, run_cell, running
from benchmarks.real_presets.table import plot, table


def main() -> None:
    """Runs cells, or prints the table of all that have been run."""
    args = _parse()
    if args.what == "table":
        print(table(args.out, args.bases))
        if args.picture is not None:
            plot(args.out, args.picture)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.model, args.requests, args.max_num_seqs, args.threads, args.texts, args.peer_venv)
    with running(bench, [System.parse(each) for each in args.systems], args.out) as targets:
        for workload in args.workloads:
            for load in args.loads:
                for seed in args.seeds:
                    run_cell(bench, targets, workload, load, seed, args.out)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    run = what.add_parser("run", help="measure cells")
    run.add_argument("--model", type=Path, required=True)
    run.add_argument("--out", type=Path, required=True, help="folder of the figures and the servers' output")
    run.add_argument("--systems", nargs="+", default=["fcfs", "fastserve", "farsight"], help="see System.parse")
    run.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["hol"])
    run.add_argument("--loads", nargs="+", type=float, default=[0.9, 1.1, 1.8])
    run.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    run.add_argument("--requests", type=int, default=500, help="of a cell")
    run.add_argument("--max-num-seqs", type=int, default=16, help="places of each server")
    run.add_argument("--threads", type=int, default=2, help="compute threads of each server")
    run.add_argument("--texts", type=Path, help="file of the eight tasks, for the workload texts")
    run.add_argument("--peer-venv", type=Path, help="where vLLM is installed, for the system vllm")
    show = what.add_parser("table", help="what has been measured")
    show.add_argument("--out", type=Path, required=True)
    show.add_argument("--bases", nargs="+", default=["fcfs", "vllm"], help="systems of the ratios")
    show.add_argument("--picture", type=Path, help="write a picture here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
