"""Conversations in a closed loop: a turn comes when its client has read the answer before it, and used its tools."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farsight.core.errors import InvalidValueError
from farsight.simulator.traffic.traces import TraceError, TraceRow, read_rows
from farsight.simulator.traffic.workload import SimRequest

MAX_IDS = 1 << 32
"""Block ids of one conversation lie below this; above them its number tells conversations apart."""

FIRST, AFTER_TOOL, AFTER_USER = "first turn", "after a tool", "after a user"
"""The classes of turns: what its newest input is."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
        blocks: Ids of the prompt's full blocks, as runs of (first id, number of ids).
        gap_s: Seconds from the answer before to this request; from the conversation's begin for the first.
        kind: ``FIRST``, ``AFTER_TOOL`` or ``AFTER_USER``.
    """

    prompt_len: int
    output_len: int
    blocks: tuple[tuple[int, int], ...]
    gap_s: float
    kind: str


@dataclass(frozen=True, slots=True)
class TracedConversation:
    """A chain of turns; prompts of other conversations share no block with theirs.

    Attributes:
        number: Its line in the file, from 1; unique among those that run together.
    """

    name: str
    number: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """The conversations of a file.

    Attributes:
        block_size: Tokens of a block that an id names.
        joined: So many of these make one KV block, with the last one's name.
        num_left_out: Turns of subagents, which are not replayed: they have contexts of their own.
    """

    conversations: tuple[TracedConversation, ...]
    block_size: int
    num_left_out: int = 0
    joined: int = 1

    @property
    def kv_block_size(self) -> int:
        """Tokens of a KV block."""
        return self.block_size * self.joined

    @property
    def num_turns(self) -> int:
        return sum(len(each.turns) for each in self.conversations)

    def scaled(self, scale: float) -> Trace:
        """Returns the same conversations with blocks of so many times the tokens; gaps stay.

        Raises:
            InvalidValueError: Blocks would hold less than a token.
        """
        size = round(self.block_size * scale)
        if size < 1:
            raise InvalidValueError("scale", scale, f"a number from {1 / self.block_size:g} on, for a block of a token")

        def shrunk(turn: Turn) -> Turn:
            num_blocks = sum(num for _, num in turn.blocks)
            rest = turn.prompt_len - num_blocks * self.block_size
            prompt_len = num_blocks * size + max(int(num_blocks == 0), round(rest * scale))
            return replace(turn, prompt_len=prompt_len, output_len=max(1, round(turn.output_len * scale)))

        found = [replace(each, turns=tuple(map(shrunk, each.turns))) for each in self.conversations]
        return replace(self, conversations=tuple(found), block_size=size)


def is_conversations(row: TraceRow) -> bool:
    """Returns whether a file with this first row holds conversations."""
    return "requests" in row.values and "block" in row.values


def read_conversations(path: Path, part: int = 1, num_parts: int = 1) -> Trace:
    """Reads a file of one conversation a line; O(file).

    Each line is a JSON object: ``block`` (tokens of a block) and ``requests``, each with ``in`` and ``out`` (tokens),
    ``h`` (ids of the prompt's full blocks as runs ``[first, number]``), ``after`` (``tool`` or ``user``) and ``think``
    (seconds from the answer before it to it). Where ``think`` is missing, it is ``t`` less the ``t`` and ``api`` of the
    turn before. An entry with ``sub`` holds a subagent's requests.

    Args:
        part: Which of ``num_parts`` equal parts, from 1: of two parts the first holds lines 1, 3, 5 ...

    Raises:
        TraceError: A file that cannot be used.
        InvalidValueError: There is no such part.
    """
    if not 1 <= part <= num_parts:
        raise InvalidValueError("part", f"{part}/{num_parts}", "K/N with 1 <= K <= N")
    found, sizes, left_out = [], set[int](), 0
    for index, row in enumerate(read_rows(path)):
        if index % num_parts != part - 1:
            continue
        sizes.add(row.length("block"))
        entries = row.value("requests")
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise row.error("requests is not a list of objects")
        left_out += sum(len(each["sub"]) for each in entries if isinstance(each.get("sub"), list))
        own = [(number, each) for number, each in enumerate(entries) if "sub" not in each]
        before = itertools.chain([{}], (each for _, each in own))
        turns = [_turn(row, number, each, last) for (number, each), last in zip(own, before, strict=False)]
        if not turns:
            raise row.error("requests holds no turn")
        found.append(TracedConversation(row.text("id"), index + 1, (_first(turns[0]), *turns[1:])))
    if not found:
        raise InvalidValueError("part", f"{part}/{num_parts}", f"a part of {path.name} that holds a conversation")
    if len(sizes) != 1:
        raise TraceError(str(path), 0, f"conversations with blocks of {sorted(sizes)} tokens; one size is read")
    return Trace(tuple(found), sizes.pop(), left_out)


def _first(turn: Turn) -> Turn:
    return Turn(turn.prompt_len, turn.output_len, turn.blocks, 0.0, FIRST)


def _turn(row: TraceRow, number: int, entry: dict[str, Any], last: dict[str, Any]) -> Turn:
    where = _entry(row, number, entry)
    name = f"requests[{number}]."
    prompt_len, block_size = where.length(f"{name}in"), row.length("block")
    after = where.text(f"{name}after")
    if after not in ("tool", "user"):
        raise row.error(f"{name}after is neither tool nor user: {after!r}")
    runs = where.value(f"{name}h")
    if not isinstance(runs, list) or not all(map(_is_run, runs)):
        raise row.error(f"{name}h is not a list of runs [first id, number of ids]")
    num_blocks = sum(length for _, length in runs)
    if num_blocks > prompt_len // block_size:
        raise row.error(f"{name}h names {num_blocks} blocks of {block_size} tokens for {prompt_len} prompt tokens")
    kind = AFTER_TOOL if after == "tool" else AFTER_USER
    blocks = tuple((first, length) for first, length in runs)
    output_len = max(1, int(where.seconds(f"{name}out")))  # an answer without a token took a step as well
    return Turn(prompt_len, output_len, blocks, _gap_s(where, name, _entry(row, number, last)), kind)


def _entry(row: TraceRow, number: int, entry: dict[str, Any]) -> TraceRow:
    """Returns an entry of ``requests`` as a row, whose errors name the entry."""
    return TraceRow(row.file, row.line, {f"requests[{number}].{name}": value for name, value in entry.items()})


def _gap_s(where: TraceRow, name: str, last: TraceRow) -> float:
    if where.values.get(f"{name}think") is not None:
        return where.seconds(f"{name}think")
    if not last.values:
        return 0.0
    api_s = last.seconds(f"{name}api") if last.values.get(f"{name}api") is not None else 0.0
    return max(0.0, where.seconds(f"{name}t") - last.seconds(f"{name}t") - api_s)


def _is_run(run: Any) -> bool:
    if not isinstance(run, list) or len(run) != 2 or not all(type(each) is int for each in run):
        return False
    return bool(min(run[0], run[1] - 1) >= 0 and sum(run) <= MAX_IDS)


class ClosedLoop:
    """The turns of conversations as they come due; a source of arrivals for ``Fleet.run``.

    Args:
        trace: Conversations of unique numbers.
        begins: The instant at which each begins.

    Every request has the longest output of all as its ``max_new_tokens``, so that no scheduler knows lengths by it.
    """

    def __init__(self, trace: Trace, begins: Iterable[float]) -> None:
        self._joined, conversations = trace.joined, trace.conversations
        self.max_new_tokens = max(turn.output_len for each in conversations for turn in each.turns)
        self._due: list[tuple[float, int, TracedConversation, int]] = []  # at, tie, of which conversation, which turn
        self._ties = itertools.count()
        self._under_way: dict[str, tuple[TracedConversation, int]] = {}
        for conversation, at in zip(conversations, begins, strict=True):
            self._add(conversation, 0, at)

    def _add(self, conversation: TracedConversation, index: int, at: float) -> None:
        heapq.heappush(self._due, (at, next(self._ties), conversation, index))

    @property
    def next_at(self) -> float:
        """Instant of the next turn; infinity where none comes before an answer."""
        return self._due[0][0] if self._due else math.inf

    def take(self, now: float) -> list[SimRequest]:
        """Takes the turns that are due."""
        arrivals = []
        while self._due and self._due[0][0] <= now:
            at, _, conversation, index = heapq.heappop(self._due)
            arrivals.append(self._request(conversation, index, at))
            self._under_way[arrivals[-1].request_id] = conversation, index
        return arrivals

    def ended(self, request_id: str, now: float) -> None:
        """Books the end of a turn's answer; the next turn comes its gap later."""
        conversation, index = self._under_way.pop(request_id)
        if index + 1 < len(conversation.turns):
            self._add(conversation, index + 1, now + conversation.turns[index + 1].gap_s)

    def _request(self, conversation: TracedConversation, index: int, at: float) -> SimRequest:
        turn, base = conversation.turns[index], conversation.number * MAX_IDS
        runs = (range(base + first, base + first + num) for first, num in turn.blocks)
        return SimRequest(
            f"{conversation.name}/{index}",
            at,
            turn.prompt_len,
            turn.output_len,
            self.max_new_tokens,
            tuple(itertools.chain.from_iterable(runs))[self._joined - 1 :: self._joined],
            turn.kind,
            session=conversation.name,
        )
