"""The named workloads of the command line: one table from a name to what builds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.simulator.traffic.arrivals import AllAtOnce, ArrivalProcess, Gamma, Poisson, debatch, rescale
from farsight.simulator.traffic.lengths import D1, D2, D3, GSM8K_LIKE, SHAREGPT_LIKE, LengthPair, Uniform, ZipfLengths
from farsight.simulator.traffic.prefixes import LAWS, PrefixLaw, mooncake_blocks, prefix_workload, real_prefixes
from farsight.simulator.traffic.traces import find_data, read_texts, read_trace
from farsight.simulator.traffic.workload import SimRequest

CHAT = LengthPair(Uniform(20, 200), Uniform(10, 64), 64)
REPORT = LengthPair(Uniform(200, 600), Uniform(200, 640), 640)
REPORT_SHARE = 0.25


def chat_and_reports(rng: np.random.Generator, num_requests: int, process: ArrivalProcess) -> list[SimRequest]:
    """Chat messages and, one in four, reports of ten times the length; each kind with its own ``max_new_tokens``.

    The laws are assumed, not fitted to a data set. O(num_requests).
    """
    instants = process.sample(rng, num_requests)
    are_reports = rng.random(num_requests) < REPORT_SHARE
    drawn = {
        pair: (pair.prompt.sample(rng, num_requests), pair.output.sample(rng, num_requests)) for pair in (CHAT, REPORT)
    }
    requests = []
    for i, (at, is_report) in enumerate(zip(instants, are_reports, strict=True)):
        pair = REPORT if is_report else CHAT
        prompts, outputs = drawn[pair]
        kind = "report" if is_report else "chat"
        requests.append(
            SimRequest(f"{kind}-{i}", float(at), int(prompts[i]), int(outputs[i]), pair.max_new_tokens, app=kind)
        )
    return requests


Builder = Callable[[np.random.Generator, int, float | None, Path | None], list[SimRequest]]
"""(rng, num_requests, rate in requests per second, folder of the data files) -> arrivals in order.

Without a rate, drawn workloads arrive all at once and traces keep their own pace.
"""

BLOCK_SIZE = 16
NUM_PREFIXES = 200
"""For the prefix workloads: tokens in a block and distinct prefixes (Preble's smaller Toolbench set)."""

ZIPF = LengthPair(ZipfLengths(0.9, 1024), ZipfLengths(0.9, 1024), 1024)
"""FastServe's law; its bound is not published, 1024 is assumed."""


def build_workload(
    name: str, rng: np.random.Generator, num_requests: int, rate: float | None = None, data_dir: Path | None = None
) -> list[SimRequest]:
    """The workload of that name.

    Raises:
        InvalidValueError: Unknown name, fewer requests than 1, or more than its trace holds.
        MissingTraceError, TraceError: Its file is missing or cannot be used.
    """
    if name not in WORKLOADS:
        raise InvalidValueError("workload", name, f"one of {', '.join(sorted(WORKLOADS))}")
    if num_requests < 1:
        raise InvalidValueError("num_requests", num_requests, "at least 1")
    return WORKLOADS[name](rng, num_requests, rate, data_dir)


def draw(
    name: str, pair: LengthPair, process: ArrivalProcess, rng: np.random.Generator, num_requests: int
) -> list[SimRequest]:
    """Arrivals of one process with independent lengths. O(num_requests)."""
    instants = process.sample(rng, num_requests)
    prompts = pair.prompt.sample(rng, num_requests)
    outputs = np.minimum(pair.output.sample(rng, num_requests), pair.max_new_tokens)
    return [
        SimRequest(f"{name}-{i}", float(at), int(prompt), int(output), pair.max_new_tokens, app=name)
        for i, (at, prompt, output) in enumerate(zip(instants, prompts, outputs, strict=True))
    ]


def retime(arrivals: Sequence[SimRequest], instants: Sequence[float] | np.ndarray) -> list[SimRequest]:
    """The same requests at these instants. O(n)."""
    return [replace(a, arrived_at=float(at)) for a, at in zip(arrivals, instants, strict=True)]


def _drawn(
    name: str, pair: LengthPair, cv: float, rng: np.random.Generator, num: int, rate: float | None, _: Path | None
) -> list[SimRequest]:
    return draw(name, pair, _process(rate, cv), rng, num)


def _traced(file: str, _: np.random.Generator, num: int, rate: float | None, data_dir: Path | None) -> list[SimRequest]:
    arrivals = read_trace(find_data(file, data_dir))
    if num > len(arrivals):
        raise InvalidValueError("num_requests", num, f"at most the {len(arrivals)} of {file}")
    instants = np.array([a.arrived_at for a in arrivals])
    if arrivals[0].prefix:
        arrivals, instants = mooncake_blocks(arrivals, BLOCK_SIZE), debatch(instants)
    instants = instants[:num] - instants[0]
    return retime(arrivals[:num], instants if rate is None else rescale(instants, rate))


def _texts(
    files: tuple[str, ...], rng: np.random.Generator, num: int, rate: float | None, data_dir: Path | None
) -> list[SimRequest]:
    """Drawn evenly and with replacement from all requests of the files."""
    pool = [a for file in files for a in read_texts(find_data(file, data_dir))]
    longest = max(a.max_new_tokens for a in pool)
    chosen = rng.integers(len(pool), size=num)
    drawn = [replace(pool[int(c)], request_id=f"text-{i}", max_new_tokens=longest) for i, c in enumerate(chosen)]
    return retime(drawn, _process(rate).sample(rng, num))


def _prefixed(
    law: PrefixLaw, rng: np.random.Generator, num: int, rate: float | None, _: Path | None
) -> list[SimRequest]:
    return prefix_workload(rng, _process(rate).sample(rng, num).tolist(), law, NUM_PREFIXES, BLOCK_SIZE)


def _real(kind: str, rng: np.random.Generator, num: int, rate: float | None, data_dir: Path | None) -> list[SimRequest]:
    path = find_data("prefix_groups.jsonl.gz", data_dir)
    return real_prefixes(rng, _process(rate).sample(rng, num).tolist(), path, kind, BLOCK_SIZE)


def _mixed(rng: np.random.Generator, num: int, rate: float | None, _: Path | None) -> list[SimRequest]:
    return chat_and_reports(rng, num, _process(rate))


def _process(rate: float | None, cv: float = 1.0) -> ArrivalProcess:
    if rate is None:
        return AllAtOnce()
    return Poisson(rate) if cv == 1.0 else Gamma(rate, cv)


WORKLOADS: dict[str, Builder] = {
    "d1": partial(_drawn, "d1", D1, 1.0),
    "d2": partial(_drawn, "d2", D2, 1.0),
    "d3": partial(_drawn, "d3", D3, 1.0),
    "gsm8k-like": partial(_drawn, "gsm8k-like", GSM8K_LIKE, 1.0),
    "sharegpt-like": partial(_drawn, "sharegpt-like", SHAREGPT_LIKE, 1.0),
    "zipf": partial(_drawn, "zipf", ZIPF, 4.0),
    "chat-and-reports": _mixed,
    "azure-conv": partial(_traced, "azure2023_conv.csv.gz"),
    "azure-code": partial(_traced, "azure2023_code.csv.gz"),
    "mooncake": partial(_traced, "mooncake_conversation.jsonl.gz"),
    "mooncake-synthetic": partial(_traced, "mooncake_synthetic.jsonl.gz"),
    "apps8": partial(_texts, ("apps_text.jsonl.gz",)),
    "apps8-alpaca": partial(_texts, ("apps_text.jsonl.gz", "alpaca.jsonl.gz")),
    **{app: partial(_prefixed, law) for app, law in LAWS.items()},
    **{kind: partial(_real, kind) for kind in ("toolbench", "loogle", "react_hotpotqa", "react_fever", "alfworld")},
}
"""Zipf comes with Gamma arrivals of CV 4, as in FastServe's load figures; the others with Poisson arrivals."""
