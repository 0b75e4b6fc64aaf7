"""Starts ``farsight serve``, loads it and stops it: ``python -m benchmarks.http_suite --model DIR --workload FILE``.

Arguments after ``--`` go to ``farsight serve``. Exits with 1 if a request failed or the server left a process behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.farsight_server import FarsightServer
from benchmarks.http_load import COLUMNS, Load, Target, add_load_arguments, report_errors
from benchmarks.processes import ProcessTree
from benchmarks.results import level_table, provenance, write_json
from benchmarks.workload import read_workload

IDLE_S = 3.0


def main() -> int:
    """Measures and prints the table."""
    args = _parse()
    log = args.log or Path(tempfile.mkdtemp(prefix="farsight-bench-")) / "server.log"
    server = FarsightServer(args.model, ["--dtype", args.dtype, *args.serve_options], log)
    print(f"server log: {log}", file=sys.stderr)
    try:
        record = measure(server, args)
    finally:
        end = server.stop()
        print(describe_end(end))
    print(level_table(record["levels"], COLUMNS))
    write_json(args.json, {**provenance("benchmarks.http_suite"), "server": server.command, **record, "end": end})
    clean = not end["left_behind"] and end["exit_status"] == 0
    return max(report_errors(record["errors"]), 0 if clean else 1)


def measure(server: FarsightServer, args: argparse.Namespace) -> dict[str, Any]:
    """The start, the idle server and the load."""
    ready_s = server.wait_until_ready(args.ready_timeout)
    first_token_s = server.first_token()
    idle = measure_idle(server.tree)
    start = {"ready_s": ready_s, "first_token_s": first_token_s, **idle}
    print(describe_start(start), flush=True)
    target = Target(server.base_url, server.model_name, args.vocab, server=server.tree)
    load = Load(target, read_workload(args.workload, args.n))
    before = server.tree.cpu_by_process()
    levels = load.measure(args.concurrency, args.repeats)
    after = server.tree.cpu_by_process()
    used = {name: cpu_s - before.get(name, 0.0) for name, cpu_s in after.items()}
    busiest = dict(sorted(used.items(), key=lambda item: -item[1]))
    return {"start": start, "levels": levels, "errors": load.errors, "cpu_s_by_process": busiest}


def describe_start(start: dict[str, float]) -> str:
    """One line."""
    times = f"ready after {start['ready_s']:.1f} s, first token after {start['first_token_s']:.1f} s"
    idle = f"{start['num_processes']} processes, PSS {start['pss_mib']:.0f} MiB, {start['cpu_percent']:.1f} % of a core"
    return f"{times}; idle: {idle}"


def measure_idle(tree: ProcessTree) -> dict[str, float]:
    """Memory, processes and CPU use of a server that nobody asks anything."""
    cpu_s, began = tree.cpu_s(), time.perf_counter()
    time.sleep(IDLE_S)
    cpu_percent = 100 * (tree.cpu_s() - cpu_s) / (time.perf_counter() - began)
    return {
        "num_processes": len(tree.processes()),
        "pss_mib": tree.pss_bytes() / 2**20,
        "cpu_percent": cpu_percent,
    }


def describe_end(end: dict[str, Any]) -> str:
    """One line, or more if something was left behind."""
    left = end["left_behind"]
    line = f"stopped after {end['stop_s']:.1f} s with status {end['exit_status']}, {len(left)} processes left"
    return "\n  ".join([line, *left])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    add_load_arguments(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ready-timeout", type=float, default=120.0, help="seconds")
    parser.add_argument("--log", type=Path, help="the server's output; default: a new temporary file")
    parser.add_argument("serve_options", nargs="*", help="after --: more arguments of farsight serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
