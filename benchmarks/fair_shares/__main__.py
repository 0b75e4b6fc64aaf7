"""Two tenants on one replica: ``python -m benchmarks.fair_shares``.

The small tenant sends a fixed share of what the replica can serve. Its neighbour sends as much, then ten times as much:
with fair shares, and with both as one tenant. Simulated for every preset, or with ``--live`` by a server on an emulated
device. Exits with 1 if docs/policies/fair_shares.md asks for more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.fair_shares import live
from benchmarks.fair_shares.simulated import HEAD, PRESETS, Sizes, measure
from farsight.services.bench.report import provenance, write_json

PROGRAM = ("python", "-m", "benchmarks.fair_shares")


def main() -> int:
    args = _parse()
    if args.live:
        found = live.measure(args.load, args.duration, args.seed, args.serve_options)
        print(found.text(), flush=True)
        write_json(args.json, {**provenance(PROGRAM), "live": found.summary()})
        return 0 if found.holds else 1
    sizes = Sizes(args.workload, args.load, args.n, args.max_num_seqs, args.seed)
    print(HEAD)
    rows = []
    for preset in args.preset or PRESETS:
        rows.append(measure(preset, sizes))
        print(rows[-1].row(), flush=True)
    write_json(args.json, {**provenance(PROGRAM), "rows": rows})
    return 0 if all(row.holds for row in rows) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, action="append", help="only this one; may be repeated")
    parser.add_argument("--workload", default="sharegpt-like", help="as of farsight simulate")
    parser.add_argument("--load", type=float, default=0.4, help="of the small tenant, as a share of the capacity")
    parser.add_argument("-n", type=int, default=500, help="requests of the small tenant")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="sequences of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", action="store_true", help="a server on an emulated device in place of the simulator")
    parser.add_argument("--duration", type=float, default=40.0, help="with --live: seconds of each of three runs")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("serve_options", nargs="*", help="with --live, after --: more arguments of farsight serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
