"""Seeded workloads as JSON lines: ``python -m benchmarks.workload --kind skewed --n 256 --seed 1 --out FILE``.

A line holds lengths and a seed; the prompt's token ids are drawn from that seed, so a file fits any model.

Kinds: ``uniform`` output lengths; ``skewed``, log-normal ones; ``hol``, few very long outputs spread among many short
ones, so that first come, first served always has a straggler; ``hol-burst``, the same with the long ones first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROMPT_LENS = (64, 256)
OUTPUT_LENS = (8, 256)
SHORT_LENS = (8, 32)
LONG_LENS = (384, 768)
LONG_PERIOD = 12
"""One long output in so many requests of ``hol`` (8 %)."""
SKEWED_MEDIAN = 28.0
SKEWED_SIGMA = 1.0

VOCAB_SIZE = 4096
FIRST_ID = 3
"""Lower ids are special tokens."""


@dataclass(slots=True)
class Row:
    """One request of a workload; the fields are those of the file."""

    id: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    prefix_tokens: int = 0
    prefix_seed: int = 0
    # The field is called "class" in the file.
    kind: str = "short"

    def prompt_ids(self, vocab_size: int = VOCAB_SIZE, salt: int = 0) -> list[int]:
        """Token ids, the shared prefix first; another ``salt`` gives another prompt of the same length."""
        prefix = random.Random(self.prefix_seed)
        own = random.Random(self.seed + (salt << 32))
        ids = [prefix.randrange(FIRST_ID, vocab_size) for _ in range(self.prefix_tokens)]
        return ids + [own.randrange(FIRST_ID, vocab_size) for _ in range(self.prompt_tokens)]

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        fields["class"] = fields.pop("kind")
        return json.dumps(fields)

    @classmethod
    def from_json(cls, line: str) -> Row:
        fields = json.loads(line)
        return cls(kind=fields.pop("class", "short"), **fields)


def read_workload(path: Path, limit: int | None = None) -> list[Row]:
    """The first ``limit`` requests of a file, all by default."""
    return [Row.from_json(line) for line in path.read_text("utf-8").splitlines()[:limit]]


def make_workload(kind: str, num_requests: int, seed: int) -> list[Row]:
    """The requests of a kind; the same arguments give the same requests."""
    rng = random.Random(seed)
    draw = OUTPUT_LEN_OF_KIND[kind]
    rows = []
    for i in range(num_requests):
        output_len = draw(rng)  # the order of the draws is part of the format
        rows.append(Row(i, rng.randint(*PROMPT_LENS), output_len, rng.getrandbits(31), prefix_seed=seed * 1000))
    if kind.startswith("hol"):
        _lengthen(rows, rng)
    if kind == "hol-burst":
        rows.sort(key=lambda row: row.kind != "long")
    for i, row in enumerate(rows):
        row.id = i
    return rows


def _uniform(rng: random.Random) -> int:
    return rng.randint(*OUTPUT_LENS)


def _skewed(rng: random.Random) -> int:
    drawn = math.exp(rng.gauss(math.log(SKEWED_MEDIAN), SKEWED_SIGMA))
    return int(min(OUTPUT_LENS[1], max(OUTPUT_LENS[0], drawn)))


def _short(rng: random.Random) -> int:
    return rng.randint(*SHORT_LENS)


OUTPUT_LEN_OF_KIND: dict[str, Callable[[random.Random], int]] = {
    "uniform": _uniform,
    "skewed": _skewed,
    "hol": _short,
    "hol-burst": _short,
}


def _lengthen(rows: list[Row], rng: random.Random) -> None:
    """Makes one request of every period a long one, at a random place in it."""
    for start in range(0, len(rows), LONG_PERIOD):
        row = rows[start + rng.randrange(min(LONG_PERIOD, len(rows) - start))]
        row.max_tokens = rng.randint(*LONG_LENS)
        row.kind = "long"


def main() -> None:
    """Writes the file and prints what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=OUTPUT_LEN_OF_KIND, default="skewed")
    parser.add_argument("--n", type=int, default=256, help="requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = make_workload(args.kind, args.n, args.seed)
    args.out.write_text("".join(row.to_json() + "\n" for row in rows), "utf-8")
    lens = [row.max_tokens for row in rows]
    facts = {
        "out": str(args.out),
        "requests": len(rows),
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "output_tokens": sum(lens),
        "output_median": statistics.median(lens),
        "output_max": max(lens),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
