"""Structured output: which schemas are followed and how well, and what a grammar costs.

``python -m benchmarks.structured suite FOLDER``: the JSON-Schema test suite, draft 2020-12 (the folder ``json`` of the
source distribution of ``jsonschema``). Every schema is accepted or refused; the outputs of random weights for each that
is accepted must be valid or cut.

``python -m benchmarks.structured speed --model DIR``: tokens per second of one engine, constrained and free in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine.engine import Engine, RequestOutput
from farsight.services.bench.report import markdown_table
from farsight.services.launch.launch import EMBEDDED_MODEL
from farsight.tokenization.grammars.compiler import GrammarCompiler, problem_of
from farsight.tokenization.grammars.problems import GrammarRefused
from farsight.tokenization.grammars.sources import of_schema
from farsight.tokenization.loading import load_tokenizer

LONG = {"type": "array", "minItems": 10_000, "items": {"type": "object", "properties": {"name": {"type": "string"}}}}
"""What never ends within a run."""


@dataclass
class Tally:
    """What became of the schemas of one file of the suite.

    Attributes:
        instances, right: Instances of accepted schemas, and how many are judged as the suite says.
        too_much: Instances that are valid and that the grammar does not write.
        outputs, valid, cut: Outputs for accepted schemas; those that are neither valid nor cut are wrong.
    """

    schemas: int = 0
    accepted: int = 0
    instances: int = 0
    right: int = 0
    too_much: int = 0
    outputs: int = 0
    valid: int = 0
    cut: int = 0

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def wrong(self) -> int:
        return self.outputs - self.valid - self.cut

    def row(self, name: str) -> list[str]:
        refused = self.schemas - self.accepted
        numbers = [self.schemas, self.accepted, refused, self.outputs, self.valid, self.cut, self.wrong]
        return [name, *map(str, numbers), f"{self.right}/{self.instances}", str(self.too_much)]


HEAD = ["file", "schemas", "accepted", "refused", "outputs", "valid", "cut", "wrong", "instances right", "not written"]


class Suite:
    """Runs the suite.

    Args:
        outputs: For each accepted schema.
        max_tokens: Most tokens of an output, which is cut there.
    """

    def __init__(self, outputs: int, max_tokens: int) -> None:
        self._outputs = outputs
        self._max_tokens = max_tokens
        self._engine = Engine(EMBEDDED_MODEL, engine=EngineConfig(kv_memory="64MiB", max_num_seqs=64))
        tokenizer = load_tokenizer(EMBEDDED_MODEL)
        eos = tokenizer.token_to_id("</s>")
        if eos is None:
            raise RuntimeError("the embedded model has no token that ends an output")
        self._compiler = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), (eos,))
        self._tokenizer, self._eos = tokenizer, eos

    def run(self, file: Path) -> tuple[Tally, list[str]]:
        """One file; returns what is wrong as well."""
        tally, wrong = Tally(), []
        cases = json.loads(file.read_text())
        tally.schemas = len(cases)
        followed = [(case, grammar) for case in cases if (grammar := _grammar(case["schema"])) is not None]
        tally.accepted = len(followed)
        for case, grammar in followed:
            for instance in case["tests"]:
                writes = self._writes(grammar, json.dumps(instance["data"], ensure_ascii=False))
                tally.instances += 1
                tally.right += writes == instance["valid"]
                tally.too_much += instance["valid"] and not writes
        for case, answer in self._answers(followed):
            tally.outputs += 1
            if answer.finish_reason == "length":
                tally.cut += 1
            elif answer.finish_reason == "stop" and _is_valid(answer.text, case["schema"]):
                tally.valid += 1
            else:
                wrong.append(f"{file.stem}: {case['description']}: {answer.finish_reason} {answer.text[:200]!r}")
        return tally, wrong

    def _writes(self, grammar: str, text: str) -> bool:
        """Whether the grammar can write this text as a whole."""
        matcher = self._compiler.follow(grammar)
        ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._eos]
        return matcher.num_allowed(ids) == len(ids)

    def _answers(self, followed: list[tuple[Any, str]]) -> Iterator[tuple[Any, RequestOutput]]:
        """Hot enough that the weights, which were trained on other text, are as good as random."""
        for seed in range(self._outputs):
            for case, grammar in followed:
                params = SamplingParams(self._max_tokens, temperature=3.0, seed=seed, grammar=grammar)
                yield case, self._engine.generate(["write"], params)[0]


def _grammar(schema: Any) -> str | None:
    try:
        grammar = of_schema(schema)
    except GrammarRefused:
        return None
    return None if problem_of(grammar) else grammar


def _is_valid(text: str, schema: Any) -> bool:
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def run_suite(args: argparse.Namespace) -> int:
    suite = Suite(args.outputs, args.max_tokens)
    total, rows, wrong = Tally(), [], []
    for file in sorted((args.folder / "tests" / "draft2020-12").glob("*.json")):
        tally, found = suite.run(file)
        total.add(tally)
        rows.append(tally.row(file.stem))
        wrong += found
    print(markdown_table(HEAD, [*rows, total.row("all")]))
    print("\n".join(wrong))
    return 1 if wrong else 0


def run_speed(args: argparse.Namespace) -> int:
    config = EngineConfig(kv_memory=args.kv_memory, num_threads=args.threads, speculation="off")
    engine = Engine(args.model, engine=config)
    grammar = of_schema(LONG, None)
    kinds = {
        "free": SamplingParams(args.tokens, temperature=1.0, ignore_eos=True),
        "constrained": SamplingParams(args.tokens, temperature=1.0, grammar=grammar),
    }
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for run in range(args.repeats + 1):
        for name, params in kinds.items():
            rate = _rate(engine, params, args.in_flight, run)
            if run:  # the first one warms up
                rates[name].append(rate)
    best = {name: max(found) for name, found in rates.items()}
    ratio = best["constrained"] / best["free"]
    middle = statistics.median(c / f for c, f in zip(rates["constrained"], rates["free"], strict=True))
    print(f"{args.in_flight} in flight: free {best['free']:.0f} tok/s, constrained {best['constrained']:.0f} tok/s")
    print(f"ratio of the best runs {ratio:.3f}, median of the pairs {middle:.3f}")
    return 0 if max(ratio, middle) >= args.least else 1


def _rate(engine: Engine, params: SamplingParams, in_flight: int, run: int) -> float:
    """Tokens per second from the first token of the last request on."""
    for index in range(in_flight):
        engine.submit([5 + run, 7, 9 + index], params)
    num_tokens, began = 0, 0.0
    while not engine.idle:
        deltas = engine.step()
        if began:
            num_tokens += sum(len(delta.token_ids) for delta in deltas)
        elif len(deltas) == in_flight:
            began = time.perf_counter()
    return num_tokens / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    suite = commands.add_parser("suite")
    suite.add_argument("folder", type=Path, help="holds tests/draft2020-12")
    suite.add_argument("--outputs", type=int, default=2, help="for each accepted schema")
    suite.add_argument("--max-tokens", type=int, default=200)
    suite.set_defaults(run=run_suite)
    speed = commands.add_parser("speed")
    speed.add_argument("--model", required=True)
    speed.add_argument("--in-flight", type=int, default=32)
    speed.add_argument("--tokens", type=int, default=100)
    speed.add_argument("--repeats", type=int, default=5)
    speed.add_argument("--threads", type=int, default=4)
    speed.add_argument("--kv-memory", default="1GiB")
    speed.add_argument("--least", type=float, default=0.95, help="fails below this ratio")
    speed.set_defaults(run=run_speed)
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
