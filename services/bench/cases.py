"""The loads that one call of ``farsight bench`` sends to every server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.bench.arrivals import drawn_arrivals, replayed_arrivals
from services.bench.datasets import parse_prefix_groups, parse_texts, parse_trace
from services.bench.files import open_lines
from services.bench.options import BenchOptions
from services.bench.requests import BenchRequest, clipped
from services.bench.workloads import GAMMA_CV, make_workload


@dataclass(frozen=True, slots=True)
class Case:
    """One load.

    Attributes:
        name: Name in tables.
        load: The number of requests in flight, or the due time of each request in seconds.
    """

    name: str
    requests: Sequence[BenchRequest]
    load: int | Sequence[float]

    @property
    def longest_output(self) -> int:
        return max(request.output_tokens for request in self.requests)

    @property
    def file_name(self) -> str:
        """The name without characters that file systems reject."""
        return "".join(char if char.isalnum() or char in "-." else "_" for char in self.name)


def make_cases(options: BenchOptions) -> list[Case]:
    """Every workload under every load.

    Raises:
        InvalidValueError: A file cannot be used.
    """
    cases = []
    for name, drawn in _sources(options):
        requests = clipped(drawn, options.max_prompt_tokens, options.max_output_tokens)
        if options.concurrencies:
            cases += [Case(f"{name}, {num} in flight", requests, num) for num in options.concurrencies]
        elif options.trace is not None:
            cases.append(_replay(name, requests, options))
        else:
            cases.append(_open_loop(name, requests, options))
    return cases


def _sources(options: BenchOptions) -> list[tuple[str, list[BenchRequest]]]:
    limit, seed = options.num_requests, options.seed
    if options.trace is not None:
        with open_lines("--trace", options.trace) as lines:
            return [(options.trace.name, parse_trace(options.trace.name, lines, limit, seed))]
    if options.texts is not None:
        name = options.texts.name
        with open_lines("--texts", options.texts) as lines:
            return [(name, parse_texts(name, lines, limit, seed, options.output_tokens))]
    if options.prefix_groups is not None:
        name = options.prefix_groups.name
        with open_lines("--prefix-groups", options.prefix_groups) as lines:
            return [(name, parse_prefix_groups(name, lines, limit, seed, options.output_tokens))]
    return [
        (name, make_workload(name, limit, seed, options.num_groups, options.prefix_tokens))
        for name in options.workloads
    ]


def _replay(name: str, requests: Sequence[BenchRequest], options: BenchOptions) -> Case:
    scale = options.time_scale if options.time_scale is not None else 1.0
    arrivals = replayed_arrivals([request.arrival_s or 0.0 for request in requests], options.rate, scale)
    paced = f"{options.rate:g} req/s" if options.rate is not None else f"times x {scale:g}"
    return Case(f"{name}, {paced}", requests, arrivals)


def _open_loop(name: str, requests: Sequence[BenchRequest], options: BenchOptions) -> Case:
    assert options.rate is not None  # Otherwise it is a closed loop.
    cv = options.cv if options.cv is not None else GAMMA_CV if name == "gamma" else 1.0
    arrivals = drawn_arrivals(len(requests), options.rate, cv, options.seed)
    return Case(f"{name}, {options.rate:g} req/s, CV {cv:g}", requests, arrivals)
