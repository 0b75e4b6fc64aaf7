"""Requests from the user's own files, packed with gzip or not: traces, texts, chats and groups that share a prefix.

A **trace** is one that ``farsight simulate`` reads too: CSV or JSON lines of a time, a prompt and an output length in
tokens, as Azure and Mooncake publish them, or of ``arrived_at``, ``prompt_len`` and ``output_len``. Mooncake's
``hash_ids``, one per 512 tokens of prompt, say what prompts share. **Texts** are JSON lines with ``prompt``, or
``instruction`` and perhaps ``user_input`` or ``input``; the output is as long as ``output_tokens`` says or as the
reference ``output`` is. **Chats** are such texts without their lengths, JSON lines with ``messages`` (sent up to the
user's last one), ShareGPT's JSON array of ``conversations`` (the human's first turn is sent, as by vLLM's benchmark)
or, where the name does not hold ``.json``, a prompt in each line. **Prefix groups** are JSON lines with ``prefix`` and
``requests`` (each with ``input`` and perhaps ``output``) or ``turns`` (pairs of context and model text).

What is wrong in a file is a ``TraceError`` that names file and line; in a JSON array, the place takes the line's part.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from farsight.services.bench.requests import BenchRequest, PromptPart
from farsight.services.bench.workloads import GROUP_EXPONENT, ZipfRanks
from farsight.simulator.traffic.traces import MOONCAKE_BLOCK, TraceError, TraceRow, read_lines, read_rows, read_trace
from farsight.simulator.traffic.workload import SimRequest

_WORD = re.compile(r"\w+|[^\w\s]")


def trace_requests(path: Path, limit: int, seed: int) -> list[BenchRequest]:
    """Returns the first requests of a trace, with the times of the file.

    Args:
        limit: Most requests.
        seed: Seed of the prompts, where the file does not say what they share.
    """
    rng = random.Random(seed)
    return [_replayed(each, i, rng) for i, each in enumerate(read_trace(path)[:limit])]


def _replayed(traced: SimRequest, i: int, rng: random.Random) -> BenchRequest:
    parts: list[PromptPart] = []
    left = traced.prompt_len
    for block in traced.prefix:
        parts.append(PromptPart(block, min(MOONCAKE_BLOCK, left)))
        left -= parts[-1].num_tokens
    if left:
        parts.append(PromptPart(rng.getrandbits(31), left))
    return BenchRequest(i, traced.output_len, tuple(parts), kind=traced.app, arrival_s=traced.arrived_at)


def text_requests(path: Path, limit: int, seed: int, output_tokens: int) -> list[BenchRequest]:
    """Returns ``limit`` requests drawn from the texts, each once before any comes again.

    Args:
        output_tokens: Output length where a line gives none.
    """
    return _drawn([_text_request(row, output_tokens) for row in read_rows(path)], limit, seed)


def chat_requests(
    path: Path, limit: int, seed: int, most_tokens: int, longest_prompt: int | None = None
) -> list[BenchRequest]:
    """Returns ``limit`` requests drawn from the chats in which a user speaks, each once before any comes again.

    Args:
        most_tokens: Where an answer is cut that does not end by itself.
        longest_prompt: Longer chats are left out, by their estimated tokens.
    """
    asked = [request for row in _chat_rows(path) if (request := _chat_request(row, most_tokens)) is not None]
    if longest_prompt is not None:
        asked = [each for each in asked if _prompt_tokens(each) <= longest_prompt]
    if not asked:
        raise TraceError(str(path), 0, "no user speaks, or at too great a length")
    return _drawn(asked, limit, seed)


def prefix_requests(path: Path, limit: int, seed: int, output_tokens: int) -> list[BenchRequest]:
    """Returns ``limit`` requests; the group of each is drawn by Zipf's law, its requests come in turn.

    Args:
        output_tokens: Output length where a request gives none.
    """
    groups = [_group(row, output_tokens) for row in read_rows(path)]
    rng = random.Random(seed)
    rng.shuffle(groups)  # The seed decides which group is popular.
    zipf, taken = ZipfRanks(len(groups), GROUP_EXPONENT), [0] * len(groups)
    requests = []
    for i in range(limit):
        group = zipf.draw(rng)
        requests.append(replace(groups[group][taken[group] % len(groups[group])], id=i))
        taken[group] += 1
    return requests


def estimated_tokens(text: str) -> int:
    """Returns the number of words and punctuation marks, at least 1: an estimate of the token count."""
    return max(1, len(_WORD.findall(text)))


def _prompt_tokens(chat: BenchRequest) -> int:
    return sum(estimated_tokens(text) for text in (chat.text or "", *(said for _, said in chat.before)))


def _drawn(requests: Sequence[BenchRequest], limit: int, seed: int) -> list[BenchRequest]:
    rng = random.Random(seed)
    order: list[BenchRequest] = []
    while len(order) < limit:
        order += rng.sample(requests, len(requests))
    return [replace(request, id=i) for i, request in enumerate(order[:limit])]


def _text(row: TraceRow, *names: str) -> str:
    """Returns the first of these texts that a row has; empty if it has none."""
    return next((row.text(name) for name in names if row.values.get(name) is not None), "")


def _text_request(row: TraceRow, output_tokens: int) -> BenchRequest:
    if "prompt" in row.values:
        text = row.text("prompt")
    else:
        text = "\n".join(filter(None, [row.text("instruction"), _text(row, "user_input", "input")]))
    if "output_tokens" in row.values:
        output_tokens = row.length("output_tokens")
    elif row.values.get("output") is not None:
        output_tokens = estimated_tokens(row.text("output"))
    return BenchRequest(0, output_tokens, text=text, kind=_text(row, "app", "task"))


def _chat_rows(path: Path) -> Iterable[TraceRow]:
    if ".json" not in path.name:
        return [TraceRow(str(path), number, {"prompt": line}) for number, line in read_lines(path)]
    lines = read_lines(path)
    _, first = next(lines, (0, ""))
    if not first.startswith("["):
        return read_rows(path)
    try:
        entries = json.loads("\n".join([first, *(line for _, line in lines)]))
    except json.JSONDecodeError as error:
        raise TraceError(str(path), 0, f"broken JSON: {error.msg}") from None
    if not all(isinstance(entry, dict) for entry in entries):
        raise TraceError(str(path), 0, "not an array of JSON objects")
    return [TraceRow(str(path), place, entry) for place, entry in enumerate(entries, start=1)]


def _chat_request(row: TraceRow, most_tokens: int) -> BenchRequest | None:
    """Returns what a row asks; None if no user speaks in it."""
    if "messages" in row.values:
        messages = _messages(row, "messages", "role", "content")
        while messages and messages[-1][0] != "user":
            messages.pop()
    elif "conversations" in row.values:
        turns = _messages(row, "conversations", "from", "value")
        messages = [("user", said) for speaker, said in turns if speaker in ("human", "user")][:1]
    else:
        return replace(_text_request(row, most_tokens), output_tokens=most_tokens)
    if not messages:
        return None
    *before, (_, text) = messages
    return BenchRequest(0, most_tokens, text=text, before=tuple(before), kind=_text(row, "app", "task"))


def _messages(row: TraceRow, name: str, role: str, content: str) -> list[tuple[str, str]]:
    wrong = row.error(f"{name} is not a list of objects with the texts {role} and {content}")
    try:
        messages = [(each[role], each[content]) for each in row.values[name]]
    except (TypeError, KeyError):
        raise wrong from None
    if not all(isinstance(part, str) for message in messages for part in message):
        raise wrong
    return messages


def _group(row: TraceRow, output_tokens: int) -> list[BenchRequest]:
    prefix, kind = row.text("prefix"), _text(row, "workload")
    pairs = _turns(row) if "turns" in row.values else _requests(row)
    return [
        BenchRequest(0, output_tokens if output is None else estimated_tokens(output), text=prefix + own, kind=kind)
        for own, output in pairs
    ]


def _requests(row: TraceRow) -> list[tuple[str, str | None]]:
    entries = row.values.get("requests")
    try:
        pairs = [(entry["input"], entry.get("output")) for entry in entries or ()]
        if pairs and all(isinstance(own, str) and isinstance(output, str | None) for own, output in pairs):
            return pairs
    except (KeyError, TypeError, AttributeError):
        pass
    raise row.error("requests is not a list of objects with input (a text) and perhaps output")


def _turns(row: TraceRow) -> list[tuple[str, str | None]]:
    """Makes each turn a request whose prompt holds all earlier turns."""
    pairs: list[tuple[str, str | None]] = []
    said = ""
    try:
        for context, answer in row.values["turns"]:
            pairs.append((said + context, answer))
            said += context + answer
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise row.error("turns is not a list of pairs of context and model text")
    return pairs
