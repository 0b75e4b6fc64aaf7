"""Requests from the user's own files: traces, texts and groups of texts with a shared prefix.

A **trace** is CSV with a header or one JSON object per line: a time, a prompt and an output length in tokens, and
perhaps ``hash_ids``, one per 512 tokens of prompt, which say what prompts share. The columns may be named as in Azure's
or Mooncake's traces. **Texts** are JSON lines with ``prompt``, or ``instruction`` and perhaps ``user_input`` or
``input``; the output is as long as ``output_tokens`` says or as the reference ``output`` is. **Prefix groups** are JSON
lines with ``prefix`` and ``requests`` (each with ``input`` and perhaps ``output``) or ``turns`` (pairs of context and
model text).
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TextIO

from farsight.core.errors import InvalidValueError
from farsight.services.bench.requests import BenchRequest, PromptPart
from farsight.services.bench.workloads import GROUP_EXPONENT, ZipfRanks

_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def open_lines(field: str, path: Path) -> Iterator[TextIO]:
    """The lines of a file.

    Args:
        field: The option that named the file.

    Raises:
        InvalidValueError: The file cannot be read.
    """
    try:
        with path.open("rb") as probe:
            packed = probe.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        opener: Callable[..., TextIO] = gzip.open if packed else open
        with opener(path, "rt", encoding="utf-8", newline="") as lines:
            yield lines
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidValueError(field, str(path), f"a readable file of UTF-8 text ({error})") from error


BLOCK_TOKENS = 512
"""Prompt tokens per entry of ``hash_ids``."""

TIMES = ("arrival_s", "timestamp", "TIMESTAMP", "arrived_at")
INPUTS = ("input_tokens", "input_length", "ContextTokens")
OUTPUTS = ("output_tokens", "output_length", "GeneratedTokens")

_TOKEN = re.compile(r"\w+|[^\w\s]")
_NO_TEXT = ""


def parse_trace(name: str, lines: Iterable[str], limit: int, seed: int) -> list[BenchRequest]:
    """The first requests of a trace, times counted from the first one.

    Args:
        name: File name: used in errors; ``.jsonl`` in it selects the format.
        limit: Most requests to read.
        seed: Seed of prompts without ``hash_ids``.

    Raises:
        InvalidValueError: A line is wrong or there is none; names file, line and field.
    """
    is_json = ".json" in name
    rows = _json_lines(name, lines) if is_json else enumerate(csv.DictReader(lines), start=2)
    rng = random.Random(seed)
    requests: list[BenchRequest] = []
    for number, row in rows:
        if len(requests) == limit:
            break
        requests.append(_trace_row(_Row(name, number, row), len(requests), rng))
    if not requests:
        raise InvalidValueError("--trace", name, "a file with at least one request")
    requests.sort(key=lambda request: request.arrival_s or 0.0)
    return [replace(request, id=i) for i, request in enumerate(requests)]


def parse_texts(name: str, lines: Iterable[str], limit: int, seed: int, output_tokens: int) -> list[BenchRequest]:
    """``limit`` requests drawn from the texts, each once before any comes again.

    Args:
        output_tokens: Output length where a line gives none.

    Raises:
        InvalidValueError: A line is wrong or there is none.
    """
    rows = [_Row(name, number, fields) for number, fields in _json_lines(name, lines)]
    if not rows:
        raise InvalidValueError("--texts", name, "a file with at least one text")
    rng = random.Random(seed)
    order: list[_Row] = []
    while len(order) < limit:
        order += rng.sample(rows, len(rows))
    return [_text_row(row, i, output_tokens) for i, row in enumerate(order[:limit])]


def parse_prefix_groups(
    name: str, lines: Iterable[str], limit: int, seed: int, output_tokens: int
) -> list[BenchRequest]:
    """``limit`` requests; the group of each is drawn by Zipf's law, its requests come in turn.

    Raises:
        InvalidValueError: A line is wrong or there is none.
    """
    groups = [_group(_Row(name, number, fields), output_tokens) for number, fields in _json_lines(name, lines)]
    if not groups:
        raise InvalidValueError("--prefix-groups", name, "a file with at least one prefix")
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
    """Number of words and punctuation marks, at least 1; an estimate of the token count."""
    return max(1, len(_TOKEN.findall(text)))


def _json_lines(name: str, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise InvalidValueError(f"{name} line {number}", line, "a JSON object")
        yield number, fields


class _Row:
    """One line of a file; its errors name file and line."""

    def __init__(self, name: str, number: int, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self._where = f"{name} line {number}"

    def refuse(self, field: str, expected: str) -> NoReturn:
        raise InvalidValueError(f"{self._where}, {field}", self.fields.get(field), expected) from None

    def name_of(self, names: Sequence[str]) -> str:
        """The first of these fields that the line has."""
        found = next((name for name in names if self.fields.get(name) not in (None, "")), None)
        if found is None:
            self.refuse(names[0], f"a value, or one under {' or '.join(names[1:])}")
        return found

    def count(self, names: Sequence[str]) -> int:
        name = self.name_of(names)
        try:
            value = int(self.fields[name])
        except (TypeError, ValueError):
            self.refuse(name, "a number of tokens")
        if value < 0:
            self.refuse(name, "a number of tokens, 0 or more")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self.refuse(name, "a string")
        return value

    def seconds(self) -> float:
        name = self.name_of(TIMES)
        value = self.fields[name]
        try:
            # Mooncake's own files count milliseconds; only they have hash_ids beside a "timestamp".
            return float(value) / (1000 if name == "timestamp" and "hash_ids" in self.fields else 1)
        except (TypeError, ValueError):
            pass
        try:
            return datetime.fromisoformat(str(value)).timestamp()
        except ValueError:
            self.refuse(name, "seconds, or a date with a time as 2023-11-16 18:17:03.98")


def _trace_row(row: _Row, i: int, rng: random.Random) -> BenchRequest:
    prompt_tokens, output_tokens = max(1, row.count(INPUTS)), max(1, row.count(OUTPUTS))
    blocks = row.fields.get("hash_ids")
    if blocks is None:
        parts: tuple[PromptPart, ...] = (PromptPart(rng.getrandbits(31), prompt_tokens),)
    else:
        parts = _block_parts(row, blocks, prompt_tokens)
    return BenchRequest(i, output_tokens, parts, arrival_s=row.seconds())


def _block_parts(row: _Row, blocks: Any, prompt_tokens: int) -> tuple[PromptPart, ...]:
    if not isinstance(blocks, list) or len(blocks) * BLOCK_TOKENS < prompt_tokens:
        row.refuse("hash_ids", f"a list with a number for every {BLOCK_TOKENS} tokens of the prompt")
    if not all(isinstance(block, int) and block >= 0 for block in blocks):
        row.refuse("hash_ids", "a list of numbers, 0 or more")
    starts = range(0, prompt_tokens, BLOCK_TOKENS)
    return tuple(
        PromptPart(block, min(BLOCK_TOKENS, prompt_tokens - start))
        for block, start in zip(blocks, starts, strict=False)
    )


def _text_row(row: _Row, i: int, output_tokens: int) -> BenchRequest:
    if "prompt" in row.fields:
        text = row.text("prompt")
    else:
        user_input = row.text("user_input", row.text("input", _NO_TEXT))
        text = "\n".join(filter(None, [row.text("instruction"), user_input]))
    if "output_tokens" in row.fields:
        output_tokens = max(1, row.count(["output_tokens"]))
    elif row.fields.get("output") is not None:
        output_tokens = estimated_tokens(row.text("output"))
    kind = row.text("app", row.text("task", _NO_TEXT))
    return BenchRequest(i, output_tokens, text=text, kind=kind)


def _group(row: _Row, output_tokens: int) -> list[BenchRequest]:
    """Makes a request without an id, which is set later."""
    prefix, kind = row.text("prefix"), row.text("workload", _NO_TEXT)
    pairs = _turns(row) if "turns" in row.fields else _requests(row)
    return [
        BenchRequest(0, output_tokens if output is None else estimated_tokens(output), text=prefix + own, kind=kind)
        for own, output in pairs
    ]


def _requests(row: _Row) -> list[tuple[str, str | None]]:
    entries = row.fields.get("requests")
    try:
        pairs = [(entry["input"], entry.get("output")) for entry in entries or ()]
        if pairs and all(isinstance(own, str) and isinstance(output, str | None) for own, output in pairs):
            return pairs
    except (KeyError, TypeError, AttributeError):
        pass
    row.refuse("requests", "a list of objects with input (a string) and perhaps output")


def _turns(row: _Row) -> list[tuple[str, str | None]]:
    """Each turn becomes a request whose prompt holds all earlier turns."""
    pairs: list[tuple[str, str | None]] = []
    said = ""
    try:
        for context, answer in row.fields["turns"]:
            pairs.append((said + context, answer))
            said += context + answer
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        row.refuse("turns", "a list of pairs of context and model text")
    return pairs
