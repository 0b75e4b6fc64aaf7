"""Workloads whose prompts share prefixes.

``SimRequest.prefix`` names the blocks of a prompt that others may share. Equal names mean equal tokens from the first
one on, so a name stands for a place in one prefix tree: what was taken on the way there, and the block's number.
A block that ends in the request's own tokens has no name.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.simulator.traffic.lengths import Exponential, Lengths, LogNormal, ZipfLengths
from farsight.simulator.traffic.traces import MOONCAKE_BLOCK, TraceRow, count_tokens, read_rows
from farsight.simulator.traffic.workload import SimRequest

POPULARITY = 1.1
"""Exponent of the Zipf law by which prefixes are chosen (Preble, ablation)."""

REAL_MAX_NEW_TOKENS = 1024
"""Assumed ``max_new_tokens`` of requests with real prefixes, unless the answer is longer."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a prefix tree.

    Attributes:
        share: Share of a prompt's shared tokens that lie on this level; the levels of a tree add up to 1.
        branches: Children of each node above; ``None`` takes the number of prefixes asked for.
    """

    share: float
    branches: int | None


@dataclass(frozen=True, slots=True)
class PrefixLaw:
    """Lengths and sharing of the prompts of one kind of work.

    Attributes:
        prompt: Mean prompt length in tokens.
        output: Mean output length in tokens.
        shared: Part of a prompt that it shares with others.
        levels: From the root on.
        spread: Standard deviation of the logarithm of a node's length.
        turns: Requests of one conversation, each of which extends the one before; 1 for none.
    """

    app: str
    prompt: int
    output: int
    shared: float
    levels: tuple[Level, ...]
    spread: float = 0.4
    turns: int = 1


# Preble, Table 1: means of prompt, output and shared part. The paper describes the trees in words (section 3); how
# the shared tokens divide among the levels, the spread, and the turns of an agent are assumed.
TOOL_USE = PrefixLaw("tool", 1835, 43, 0.85, (Level(0.1, 1), Level(0.9, None)))
AGENT = PrefixLaw("agent", 2285, 16, 0.97, (Level(1.0, None),), turns=20)
PROGRAMMING = PrefixLaw("program", 3871, 190, 0.97, (Level(0.75, 1), Level(0.25, None)))
VIDEO_QA = PrefixLaw("video", 9865, 4, 0.88, (Level(1.0, None),))
LONG_DOCUMENT = PrefixLaw("document", 23474, 16, 0.91, (Level(1.0, None),))

LAWS = {law.app: law for law in (TOOL_USE, AGENT, PROGRAMMING, VIDEO_QA, LONG_DOCUMENT)}


class BlockNames:
    """Gives each block of a prefix tree a whole number of its own, in order of first use."""

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise InvalidValueError("block_size", block_size, "at least 1")
        self._block_size = block_size
        self._names: dict[Hashable, dict[int, int]] = {}
        self._num = 0

    def along(self, path: Sequence[tuple[Hashable, int]]) -> tuple[int, ...]:
        """Names of the full blocks along a path of (node, tokens); O(blocks).

        A block that spans two nodes belongs to the deeper one, as its tokens depend on it.
        """
        names: list[int] = []
        end = 0
        for depth, (_, num_tokens) in enumerate(path):
            end += num_tokens
            above = tuple(node for node, _ in path[: depth + 1])
            known = self._names.setdefault(above, {})
            for block in range(len(names), end // self._block_size):
                if block not in known:
                    known[block], self._num = self._num, self._num + 1
                names.append(known[block])
        return tuple(names)


def prefix_workload(
    rng: np.random.Generator,
    instants: Sequence[float],
    law: PrefixLaw,
    num_prefixes: int,
    block_size: int,
    popularity: float = POPULARITY,
    drift_s: float = math.inf,
) -> list[SimRequest]:
    """One arrival for each instant; prefixes are chosen by a Zipf law. O(requests · blocks of a prompt).

    Args:
        num_prefixes: Distinct prefixes: tools, tasks of an agent, problems, videos or documents.
        block_size: Tokens for each name; the replica's KV block size.
        drift_s: The law's ranks are dealt out to the prefixes again every so many seconds; infinity for never.

    Raises:
        InvalidValueError: No prefix, or a block size below 1.
    """
    chosen = ZipfLengths(popularity, num_prefixes).sample(rng, len(instants)) - 1
    if drift_s < math.inf:
        chosen = _drifting(rng, chosen, instants, num_prefixes, drift_s)
    builder = _conversations if law.turns > 1 else _trees
    paths = builder(rng, law, chosen, num_prefixes)
    own = _own_tokens(rng, law, len(instants))
    outputs = _outputs(rng, law, len(instants))
    names = BlockNames(block_size)
    return [
        _arrival(law, index, float(at), path, extra, int(output), names)
        for index, (at, path, extra, output) in enumerate(zip(instants, paths, own, outputs, strict=True))
    ]


def real_prefixes(
    rng: np.random.Generator,
    instants: Sequence[float],
    path: Path,
    kind: str,
    block_size: int,
    popularity: float = POPULARITY,
) -> list[SimRequest]:
    """Requests drawn from a file of real prefixes: the prefix by a Zipf law, one of its requests evenly. O(file).

    Args:
        path: ``prefix_groups.jsonl.gz``.
        kind: Which ``workload`` of the file, such as ``toolbench``.

    Raises:
        TraceError: A file that cannot be used.
        InvalidValueError: No prefix of that kind.
    """
    groups = [_group(row) for row in read_rows(path) if row.text("workload") == kind]
    if not groups:
        raise InvalidValueError("kind", kind, f"a workload of {path.name}")
    order = rng.permutation(len(groups))
    chosen = ZipfLengths(popularity, len(groups)).sample(rng, len(instants)) - 1
    names = BlockNames(block_size)
    arrivals = []
    for index, (at, rank) in enumerate(zip(instants, chosen, strict=True)):
        group = groups[int(order[int(rank)])]
        request = group.requests[int(rng.integers(len(group.requests)))]
        output = request.output_len or int(_outputs(rng, TOOL_USE, 1)[0])
        prefix = names.along([(group.name, request.shared_len)])
        arrivals.append(
            SimRequest(
                f"{kind}-{index}", float(at), request.prompt_len, output, max(REAL_MAX_NEW_TOKENS, output), prefix, kind
            )
        )
    return arrivals


def mooncake_blocks(arrivals: Sequence[SimRequest], block_size: int = MOONCAKE_BLOCK) -> list[SimRequest]:
    """Mooncake's names for blocks of 512 tokens turned into names for smaller ones; only full blocks keep a name.

    Raises:
        InvalidValueError: 512 is not a multiple of ``block_size``.
    """
    if block_size < 1 or MOONCAKE_BLOCK % block_size:
        raise InvalidValueError("block_size", block_size, f"a divisor of {MOONCAKE_BLOCK}")
    parts = MOONCAKE_BLOCK // block_size
    return [replace(a, prefix=_split(a.prefix, parts, a.prompt_len // block_size)) for a in arrivals]


@dataclass(frozen=True, slots=True)
class _Request:
    prompt_len: int
    shared_len: int
    output_len: int
    """Always 0: unknown."""


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    requests: tuple[_Request, ...]


def _drifting(
    rng: np.random.Generator, ranks: Lengths, instants: Sequence[float], num_prefixes: int, drift_s: float
) -> Lengths:
    """Prefixes by rank, in another order in each span of time."""
    spans = (np.asarray(instants) / drift_s).astype(np.int64)
    orders = np.array([rng.permutation(num_prefixes) for _ in range(int(spans.max()) + 1)])
    chosen: Lengths = orders[spans, ranks]
    return chosen


def _trees(
    rng: np.random.Generator, law: PrefixLaw, chosen: Lengths, num_prefixes: int
) -> list[list[tuple[Hashable, int]]]:
    """Each request's path: the nodes above are common, the one at the level without ``branches`` is its prefix."""
    lengths: list[dict[int, int]] = []
    for level in law.levels:
        drawn = _node_lengths(rng, law, level.share, level.branches or num_prefixes)
        lengths.append(dict(enumerate(drawn)))
    return [[(int(c) % len(of_level), of_level[int(c) % len(of_level)]) for of_level in lengths] for c in chosen]


def _conversations(
    rng: np.random.Generator, law: PrefixLaw, chosen: Lengths, num_prefixes: int
) -> list[list[tuple[Hashable, int]]]:
    """Each request's path: the task's demonstration, then a chain that the conversation's turns extend.

    A turn's own tokens are shared by the turn after it, so the chain reaches to the end of the prompt before.
    """
    step = max(1, round(law.prompt * (1 - law.shared)))
    mean_chain = step * (law.turns - 1) / 2
    share = max(0.0, 1 - mean_chain / (law.prompt * law.shared))
    demonstrations = _node_lengths(rng, law, share, num_prefixes)
    # Conversations have already begun at the start; otherwise a short run would hold only early turns.
    visits = [int(v) for v in rng.integers(law.turns, size=num_prefixes)]
    paths: list[list[tuple[Hashable, int]]] = []
    for c in map(int, chosen):
        episode, turn = divmod(visits[c], law.turns)
        visits[c] += 1
        paths.append([(c, demonstrations[c]), (episode, (turn + 1) * step)])
    return paths


def _node_lengths(rng: np.random.Generator, law: PrefixLaw, share: float, num: int) -> list[int]:
    mean = law.prompt * law.shared * share
    if num == 1:  # The part that all requests share belongs to the law, not to one draw.
        return [round(mean)]
    return [int(n) for n in LogNormal(mean, law.spread, 8 * math.ceil(mean)).sample(rng, num)]


def _outputs(rng: np.random.Generator, law: PrefixLaw, num: int) -> Lengths:
    # Rounding up adds half a token to the mean.
    return Exponential(law.output - 0.5, 8 * law.output).sample(rng, num)


def _own_tokens(rng: np.random.Generator, law: PrefixLaw, num: int) -> list[int]:
    """Tokens after the path; a conversation's turn is part of its path already, but for the last token."""
    if law.turns > 1:
        return [1] * num
    mean = law.prompt * (1 - law.shared)
    return [int(n) for n in Exponential(mean, 8 * math.ceil(mean)).sample(rng, num)]


def _arrival(
    law: PrefixLaw, index: int, at: float, path: list[tuple[Hashable, int]], own: int, output: int, names: BlockNames
) -> SimRequest:
    prompt_len = sum(num_tokens for _, num_tokens in path) + own
    return SimRequest(f"{law.app}-{index}", at, prompt_len, output, 8 * law.output, names.along(path), law.app)


def _group(row: TraceRow) -> _Group:
    prefix_len = count_tokens(row.text("prefix"))
    name = row.text("prefix_id")
    requests = _turns(row, prefix_len) if "turns" in row.values else _questions(row, prefix_len)
    if not requests:
        raise row.error("a prefix without requests")
    return _Group(name, tuple(requests))


def _questions(row: TraceRow, prefix_len: int) -> list[_Request]:
    try:
        pairs = [(str(r["input"]), r["output"]) for r in row.value("requests")]
    except (KeyError, TypeError):
        raise row.error("requests is not a list of objects with input and output") from None
    return [
        _Request(prefix_len + count_tokens(text), prefix_len, count_tokens(answer) if answer else 0)
        for text, answer in pairs
    ]


def _turns(row: TraceRow, prefix_len: int) -> list[_Request]:
    """Every turn shares its whole prompt with the turns after it."""
    requests, so_far = [], prefix_len
    try:
        for context, answer in row.value("turns"):
            so_far += count_tokens(context)
            requests.append(_Request(so_far, so_far, count_tokens(answer)))
            so_far += requests[-1].output_len
    except (TypeError, ValueError):
        raise row.error("turns is not a list of [context, answer]") from None
    return requests


def _split(names: tuple[int, ...], parts: int, num_full: int) -> tuple[int, ...]:
    return tuple(name * parts + part for name in names for part in range(parts))[:num_full]
