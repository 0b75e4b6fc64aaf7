"""Files of finished requests to train and evaluate predictors on: JSON lines, gzipped or not."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farsight.core.errors import ConfigError, FarsightError, InvalidValueError
from farsight.core.forecast import Example, ForecastQuestion

EMBEDDED_TOKENIZER = Path(__file__).parents[1] / "embedded_model"
MAX_NEW_TOKENS = 2**20
"""``max_new_tokens`` of rows that name no limit: beyond every context."""

_CHUNK = 1000
"""Number of rows whose texts are tokenized together."""


class RowError(FarsightError):
    """A row that cannot be used; the message names its line."""


@dataclass(slots=True)
class Examples:
    """The rows of a file.

    Attributes:
        examples: In the order of the file.
        tasks: The task (or app) of each; empty where a row names none.
        rejected: A message for each row that was skipped.
    """

    examples: list[Example] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    instruction: str
    user_input: str
    output: str | int
    task: str
    censored: bool
    image_tokens: tuple[int, ...]


class TokenCounter:
    """Counts tokens with the served model's tokenizer.

    Args:
        path: A ``tokenizer.json``, or the directory of a model that has one.

    Raises:
        ConfigError: The path has no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from farsight.tokenization.loading import load_tokenizer

        try:
            self._tokenizer = load_tokenizer(path)
        except InvalidValueError as error:
            expected = f"a tokenizer.json or a directory with one ({error})"
            raise ConfigError("--tokenizer", str(path), expected) from error

    def count(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without tokens that mark its beginning or end."""
        return [len(each.ids) for each in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def read_examples(
    path: Path, counter: TokenCounter, strict: bool = False, progress: Callable[[int], None] | None = None
) -> Examples:
    """Reads rows with ``instruction``, ``user_input`` and ``output`` or ``output_len``.

    They may also have ``task`` or ``app``, ``censored`` for an output that was cut off, and ``image_tokens``: the
    tokens of a picture, or a list of them.

    Args:
        path: JSON lines; ``.gz`` is unpacked.
        counter: Counts tokens of prompts, and of outputs given as text.
        strict: Whether the first row that cannot be used is an error.
        progress: Called with the number of rows read.

    Raises:
        RowError: ``strict``, and a row cannot be used.
        ConfigError: The file cannot be read, or holds no usable row.
    """
    found = Examples()
    pending: list[tuple[int, _Row]] = []
    try:
        for number, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            try:
                pending.append((number, _parse(line)))
            except ValueError as error:
                message = f"{path}, line {number}: {error}"
                if strict:
                    raise RowError(message) from error
                found.rejected.append(message)
            if len(pending) == _CHUNK:
                _take(pending, counter, found)
                if progress is not None:
                    progress(number)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError("DATA", str(path), f"a file of JSON lines, gzipped if it ends in .gz ({error})") from error
    _take(pending, counter, found)
    if not found.examples:
        why = f"; first: {found.rejected[0]}" if found.rejected else ""
        raise ConfigError("DATA", str(path), f"rows with instruction, user_input and output or output_len{why}")
    return found


def _lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _parse(line: bytes) -> _Row:
    """Raises ValueError: what is wrong with the row."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    task = row.get("task", row.get("app", ""))
    censored = row.get("censored", False)
    if not isinstance(task, str):
        raise ValueError("task: not a string")
    if not isinstance(censored, bool):
        raise ValueError("censored: neither true nor false")
    texts = _text(row, "instruction"), _text(row, "user_input")
    return _Row(*texts, _output(row), task, censored, _image_tokens(row))


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: {'missing' if value is None else 'not a string'}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: half a surrogate pair") from error
    return value


def _image_tokens(row: dict[str, Any]) -> tuple[int, ...]:
    given = row.get("image_tokens", [])
    tokens = given if isinstance(given, list) else [given]
    if not all(type(each) is int and 0 < each < MAX_NEW_TOKENS for each in tokens):
        raise ValueError(f"image_tokens: not a number of tokens from 1 to {MAX_NEW_TOKENS - 1}, or a list of such")
    return tuple(tokens)


def _output(row: dict[str, Any]) -> str | int:
    if "output_len" not in row:
        if "output" not in row:
            raise ValueError("output and output_len: both missing")
        return _text(row, "output")
    value = row["output_len"]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_NEW_TOKENS:
        raise ValueError(f"output_len: not a number of tokens from 0 to {MAX_NEW_TOKENS - 1}")
    return value


def _take(pending: list[tuple[int, _Row]], counter: TokenCounter, found: Examples) -> None:
    rows = [row for _, row in pending]
    app_lens = counter.count([row.instruction for row in rows])
    user_lens = counter.count([row.user_input for row in rows])
    counted = iter(counter.count([row.output for row in rows if isinstance(row.output, str)]))
    for (number, row), app_len, user_len in zip(pending, app_lens, user_lens, strict=True):
        question = ForecastQuestion(
            request_id=str(number),
            instruction=row.instruction,
            user_input=row.user_input,
            user_input_len=user_len,
            prompt_len=app_len + user_len + sum(row.image_tokens),
            max_new_tokens=MAX_NEW_TOKENS,
            image_tokens=row.image_tokens,
        )
        output_len = next(counted) if isinstance(row.output, str) else row.output
        found.examples.append(Example(question, output_len, row.censored))
        found.tasks.append(row.task)
    pending.clear()
