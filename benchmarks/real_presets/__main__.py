"""Presets side by side on a model that computes: ``python -m benchmarks.real_presets run --model DIR --out DIR``.

Open loop at ``--loads`` times the capacity of the first system, gaps with a coefficient of variation of 2, the
requests ``hol`` of ``farsight bench`` or the texts of eight tasks with their real lengths, which are hidden from the
schedulers. The servers run on this machine one after the other. The figures of each system in each cell (workload,
load, seed) are written when it has served, and what is written is not measured again: the same command goes on where
it was. With ``--for-s`` it ends after so many seconds, with status 3 while runs are missing.
``python -m benchmarks.real_presets table --out DIR`` puts together what there is.

``python -m benchmarks.real_presets simulate --profile FILE --out DIR`` runs the cells of ``hol`` in the simulator, with
the prices of a machine as ``farsight profile`` measures them, into a folder of their own for the same table. With
``--kv-tokens`` memory is what is short.

With ``--workloads chats chats-cv3 chats-burst --chats FILE --max-num-seqs 128`` both send chats, half of them streamed:
servers answer them to their natural ends, in the simulator answers are as long as in the file, which ``record`` writes.
``table --chats`` says what their clients see, ``table --presets`` what each preset makes of a memory.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from benchmarks.real_presets.cells import WORKLOADS, Bench, Run, System, missing
from benchmarks.real_presets.chats import FOLDS, GAPS, read_chats, record
from benchmarks.real_presets.part import measure_part
from benchmarks.real_presets.simulated import Machine, simulate
from benchmarks.real_presets.table import chat_table, plot, preset_table, table
from farsight.services.commands.simulate import hardware

RUNS_ARE_MISSING = 3
"""Exit status of a part that ended before the whole."""


def main() -> None:
    """Runs cells, or prints the table of all that have been run."""
    args = _parse()
    if args.what == "table":
        rows = preset_table if args.presets else chat_table
        print(rows(args.out, args.bases[0]) if args.presets or args.chats else table(args.out, args.bases))
        if args.picture is not None:
            plot(args.out, args.picture)
        return
    if args.what == "simulate":
        args.out.mkdir(parents=True, exist_ok=True)
        systems = [System.parse(each) for each in args.systems]
        runs = missing([each.name for each in systems], args.workloads, args.loads, args.seeds, args.out)
        bench = Bench(args.out, args.requests, args.max_num_seqs)
        chats = () if args.chats is None else read_chats(args.chats, folds=0 if args.blind else FOLDS)
        latency, kv_tokens = hardware(None, None, None, args.profile)
        simulate(bench, Machine(latency, args.kv_tokens or kv_tokens, chats), systems, runs, args.out)
        return
    if args.what == "record":
        record(args.url, args.model, args.prompts, args.requests, args.seed, args.out)
        return
    sys.exit(RUNS_ARE_MISSING if _run(args) else 0)


def _run(args: argparse.Namespace) -> int:
    """How many runs are missing after this part."""
    args.out.mkdir(parents=True, exist_ok=True)
    of_servers = (args.threads, args.dtype, args.texts, args.peer_venv, args.chats)
    bench = Bench(args.model, args.requests, args.max_num_seqs, *of_servers)
    systems = [System.parse(each) for each in args.systems]

    def still_missing() -> list[Run]:
        return missing([each.name for each in systems], args.workloads, args.loads, args.seeds, args.out)

    left = measure_part(bench, systems, still_missing(), args.out, args.for_s)
    while left and math.isinf(args.for_s):
        left = measure_part(bench, systems, still_missing(), args.out, args.for_s)
    print(f"{left} runs are missing", flush=True)
    return left


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    run = what.add_parser("run", help="measure cells")
    _add_cells(run)
    run.add_argument("--model", type=Path, required=True)
    run.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["hol"])
    run.add_argument("--threads", type=int, default=2, help="compute threads of each server")
    run.add_argument("--dtype", default="bfloat16", help="of all servers; float32 where processors lack bfloat16")
    run.add_argument("--for-s", type=float, default=math.inf, help="end after so many seconds, to go on later")
    run.add_argument("--texts", type=Path, help="file of the eight tasks, for the workload texts")
    run.add_argument("--chats", type=Path, help="file that record has written, for the workloads of chats")
    run.add_argument("--peer-venv", type=Path, help="where vLLM is installed, for the system vllm")
    virtual = what.add_parser("simulate", help="the cells of hol in virtual time")
    _add_cells(virtual)
    virtual.add_argument("--workloads", nargs="+", choices=("hol", *GAPS), default=["hol"])
    virtual.add_argument("--chats", type=Path, help="file that record has written, or a trace with clients")
    virtual.add_argument("--blind", action="store_true", help="no forecasts of single chats")
    virtual.add_argument("--kv-tokens", type=int, default=0, help="of the KV pool, and of the host's (default: roomy)")
    virtual.add_argument("--profile", type=Path, help="prices of the machine, from farsight profile (default: an A100)")
    asked = what.add_parser("record", help="write a file of chats: what a server answers to real prompts")
    asked.add_argument("--url", required=True)
    asked.add_argument("--model", required=True, help="its name there")
    asked.add_argument("--prompts", type=Path, required=True, help="texts or chats, as for farsight bench")
    asked.add_argument("--requests", type=int, default=200)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--out", type=Path, required=True)
    show = what.add_parser("table", help="what has been measured")
    show.add_argument("--out", type=Path, required=True)
    show.add_argument("--bases", nargs="+", default=["fcfs", "vllm"], help="systems of the ratios")
    show.add_argument("--chats", action="store_true", help="what the clients of chats see, beside the first base")
    show.add_argument("--presets", action="store_true", help="ratios to the first base, and evictions")
    show.add_argument("--picture", type=Path, help="write a picture here")
    return parser.parse_args()


def _add_cells(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures and the servers' output")
    parser.add_argument("--systems", nargs="+", default=["fcfs", "fastserve", "farsight"], help="see System.parse")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.9, 1.1, 1.8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--requests", type=int, default=500, help="of a cell")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="places of each server")


if __name__ == "__main__":
    main()
