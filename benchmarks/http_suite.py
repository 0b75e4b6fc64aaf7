"""Starts ``farsight serve``, loads it and stops it: ``python -m benchmarks.http_suite --model DIR --workload NAME``.

Arguments after ``--`` go to ``farsight serve``. Exits with 1 if a request failed or the server left a process behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.servers import RunningServer, farsight_command, vocab_size
from farsight.services.bench.compare import num_errors, run_bench
from farsight.services.bench.load import ProcessTree
from farsight.services.bench.options import BenchOptions
from farsight.services.bench.report import provenance, write_json
from farsight.services.bench.workloads import WORKLOADS

PROGRAM = ("python", "-m", "benchmarks.http_suite")
IDLE_S = 3.0


def main() -> int:
    """Measures and prints the tables."""
    args = _parse()
    log = args.log or Path(tempfile.mkdtemp(prefix="farsight-bench-")) / "server.log"
    command = farsight_command(args.model, ["--dtype", args.dtype, *args.serve_options])
    server = RunningServer(command, log)
    print(f"server log: {log}", file=sys.stderr)
    try:
        record = measure(server, args)
    finally:
        end = server.stop()
        print(describe_end(end))
    head = provenance(PROGRAM)
    write_json(args.json, {**head, "server": list(command.words), **record, "end": end})
    clean = not end["left_behind"] and end["exit_status"] == 0
    return 1 if num_errors(record["load"]) or not clean else 0


def measure(server: RunningServer, args: argparse.Namespace) -> dict[str, Any]:
    """The start, the idle server and the load."""
    ready_s = server.wait_until_ready(args.ready_timeout)
    first_token_s = server.first_token()
    start = {"ready_s": ready_s, "first_token_s": first_token_s, **measure_idle(server.tree)}
    print(describe_start(start), flush=True)
    options = BenchOptions(
        url=(server.command.base_url,),
        model=(server.command.model_name,),
        server_pid=(server.pid,),
        workload=(args.workload,),
        num_requests=args.n,
        concurrency=tuple(args.concurrency),
        repeats=args.repeats,
        seed=args.seed,
        vocab_size=args.vocab or vocab_size(args.model),
    )
    before = server.tree.cpu_by_process()
    load = run_bench(options, print, PROGRAM)
    after = server.tree.cpu_by_process()
    used = {name: cpu_s - before.get(name, 0.0) for name, cpu_s in after.items()}
    busiest = dict(sorted(used.items(), key=lambda item: -item[1]))
    return {"start": start, "load": load, "cpu_s_by_process": busiest}


def describe_start(start: dict[str, float]) -> str:
    """One line."""
    times = f"ready after {start['ready_s']:.1f} s, first token after {start['first_token_s']:.1f} s"
    idle = f"{start['num_processes']} processes, PSS {start['pss_mib']:.0f} MiB, {start['cpu_percent']:.1f} % of a core"
    return f"{times}; idle: {idle}"


def measure_idle(tree: ProcessTree) -> dict[str, float]:
    """Memory, processes and CPU use of an idle server."""
    cpu_s, began = tree.cpu_s(), time.perf_counter()
    time.sleep(IDLE_S)
    cpu_percent = 100 * (tree.cpu_s() - cpu_s) / (time.perf_counter() - began)
    return {"num_processes": len(tree.processes()), "pss_mib": tree.pss_bytes() / 2**20, "cpu_percent": cpu_percent}


def describe_end(end: dict[str, Any]) -> str:
    """One line, or more if something was left behind."""
    left = end["left_behind"]
    line = f"stopped after {end['stop_s']:.1f} s with status {end['exit_status']}, {len(left)} processes left"
    return "\n  ".join([line, *left])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, default="skewed")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n", type=int, default=256, help="requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab", type=int, help="prompts hold ids below this [the model's]")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ready-timeout", type=float, default=120.0, help="seconds")
    parser.add_argument("--log", type=Path, help="the server's output; default: a new temporary file")
    parser.add_argument("serve_options", nargs="*", help="after --: more arguments of farsight serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
