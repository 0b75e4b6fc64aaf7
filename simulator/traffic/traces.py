"""Traces and text sets from files: each reader checks every line; its errors name the line and the fault.

Files may be gzip or plain, whatever their names. A reader reads no more than it needs.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import starmap
from pathlib import Path
from typing import Any

from farsight.core.errors import FarsightError
from farsight.simulator.traffic.workload import SimImage, SimRequest

MOONCAKE_BLOCK = 512
"""Prompt tokens for each of Mooncake's ``hash_ids``."""

TOKENS_PER_REGEX_TOKEN = 1.3
OUTPUT_STRETCH = {"alpaca": 8.0}
DEFAULT_STRETCH = 4.0
"""Model tokens per word or punctuation mark, and the factors that make reference outputs as long as a chat model's."""

_AZURE = "https://github.com/Azure/AzurePublicDataset (data/AzureLLMInferenceTrace_{conv,code}.csv)"
_MOONCAKE = "https://github.com/kvcache-ai/Mooncake (FAST25-release/traces)"
SOURCES = {
    "azure": _AZURE,
    "mooncake": _MOONCAKE,
    "apps_text": "a JSONL file of id, app, task, instruction, user_input, output, one request per line",
    "alpaca": "https://github.com/tatsu-lab/stanford_alpaca, as apps_text with task alpaca",
    "prefix_groups": "a JSONL file of workload, prefix_id, prefix and requests or turns, one prefix per line",
}
"""The source of each file, by the beginning of its name."""


class TraceError(FarsightError):
    """A trace file that cannot be used.

    Args:
        file: Its path.
        line: 1-based; 0 when the file as a whole is wrong.
        reason: The fault.
    """

    def __init__(self, file: str, line: int, reason: str) -> None:
        self.file = file
        self.line = line
        self.reason = reason
        super().__init__(f"{file}:{line}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.line, self.reason)


class MissingTraceError(FarsightError):
    """A missing trace; the message names its source."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One record of a file and its line.

    Attributes:
        values: By column name; strings in CSV files.
    """

    file: str
    line: int
    values: Mapping[str, Any]

    def error(self, reason: str) -> TraceError:
        """An error that points at this row."""
        return TraceError(self.file, self.line, reason)

    def value(self, name: str) -> Any:
        """The value of a column; raises ``TraceError`` if the column is missing."""
        if self.values.get(name) is None:
            raise self.error(f"missing column {name}")
        return self.values[name]

    def seconds(self, name: str) -> float:
        """A finite number of at least 0."""
        number = self._number(name)
        if number < 0:
            raise self.error(f"{name} is negative: {number:g}")
        return number

    def length(self, name: str) -> int:
        """A whole number of at least 1."""
        number = self._number(name)
        if number < 0:
            raise self.error(f"{name} is negative: {number:g}")
        if number < 1 or number != int(number):
            raise self.error(f"{name} is not a whole number of at least 1: {number:g}")
        return int(number)

    def weight(self) -> float:
        """The column ``weight``: a finite number above 0."""
        number = self._number("weight")
        if number <= 0:
            raise self.error(f"weight is not above 0: {number:g}")
        return number

    def integer(self, name: str) -> int:
        """A whole number of any sign."""
        number = self._number(name)
        if number != int(number):
            raise self.error(f"{name} is not a whole number: {number:g}")
        return int(number)

    def text(self, name: str) -> str:
        """A string, perhaps empty."""
        text = self.value(name)
        if not isinstance(text, str):
            raise self.error(f"{name} is not a text: {text!r}")
        return text

    def names(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0."""
        names = self.value(name)
        if not isinstance(names, list) or not all(type(n) is int and n >= 0 for n in names):
            raise self.error(f"{name} is not a list of whole numbers of at least 0")
        return tuple(names)

    def images(self, prompt_len: int) -> tuple[SimImage, ...]:
        """The columns ``image_tokens`` (a number, or one for each picture) and ``image`` (a name for each).

        Args:
            prompt_len: Tokens of the prompt, those of its pictures included.
        """
        tokens = [self._image_tokens(each) for each in self._several("image_tokens")]
        if tokens == [0]:
            tokens = []  # a row without a picture in a table that has the column
        names = self._several("image") or [""] * len(tokens)
        if not all(isinstance(name, str) for name in names):
            raise self.error(f"image is not a text or a list of texts: {self.values['image']!r}")
        if len(names) != len(tokens):
            raise self.error(f"{len(names)} names in image for {len(tokens)} pictures in image_tokens")
        if 0 in tokens:
            raise self.error(f"image_tokens holds a picture of no tokens: {self.values['image_tokens']!r}")
        if sum(tokens) > prompt_len:
            raise self.error(f"image_tokens are {sum(tokens)}, more than the prompt's {prompt_len}, which hold them")
        return tuple(starmap(SimImage, zip(tokens, names, strict=True)))

    def _several(self, name: str) -> list[Any]:
        """The values of a column that may hold several: a list in JSON, parts between semicolons in CSV."""
        value = self.values.get(name)
        if value is None or value == "":
            return []
        if isinstance(value, str):
            return value.split(";")
        return value if isinstance(value, list) else [value]

    def _image_tokens(self, value: Any) -> int:
        number = _as_number(value)
        if not (number >= 0 and number == int(number)):
            raise self.error(f"image_tokens is not a whole number of at least 0, or several: {value!r}")
        return int(number)

    def _number(self, name: str) -> float:
        value = self.value(name)
        number = _as_number(value)
        if not math.isfinite(number):
            raise self.error(f"{name} is not a number: {value!r}")
        return number


def _as_number(value: Any) -> float:
    """NaN for what is no finite number."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def find_data(name: str, data_dir: Path | None = None) -> Path:
    """The path of a data file.

    Args:
        name: Such as ``azure2023_conv.csv.gz``.
        data_dir: Folder of the file; default: the environment variable FARSIGHT_DATA, else ``shared/data`` beside the
        repository's folder.

    Raises:
        MissingTraceError: The file is missing; the message names its source.
    """
    folder = data_dir or Path(os.environ.get("FARSIGHT_DATA") or _beside_repository())
    path = folder / name
    if not path.is_file():
        source = next((where for start, where in SOURCES.items() if name.startswith(start)), "its publisher")
        raise MissingTraceError(f"{path} does not exist; get it from {source}, or set FARSIGHT_DATA to its folder")
    return path


def read_trace(path: Path, format_name: str | None = None, max_new_tokens: int | None = None) -> list[SimRequest]:
    """Arrivals of a trace in order, the instants as in the file. O(file).

    Args:
        format_name: ``azure``, ``mooncake``, or ``own`` (JSON lines of arrived_at, prompt_len, output_len and, if
            wanted, max_new_tokens, prefix, app, priority, deadline_s, tenant, weight); ``None`` finds out by the first
            line. Any may have ``image_tokens`` and ``image`` as well (``TraceRow.images``).
        max_new_tokens: The clients' limit if the file has none; ``None`` takes the file's longest output. Longer
        outputs end there.

    Raises:
        TraceError: A file that is empty, cut off, of another format, or a line that cannot be used.
    """
    rows = list(read_rows(path))
    parse = _parser(path, rows[0], format_name)
    arrivals = [parse(row, path.name.split(".")[0]) for row in rows]
    for row, earlier, later in zip(rows[1:], arrivals, arrivals[1:], strict=False):
        if later.arrived_at < earlier.arrived_at:
            raise row.error(f"arrives at {later.arrived_at:g} s, before the line above at {earlier.arrived_at:g} s")
    cap = max_new_tokens or max(a.output_len for a in arrivals)
    return [_bounded(a, cap) for a in arrivals]


def read_texts(path: Path) -> list[SimRequest]:
    """Requests of a text set (instruction, user_input, output) turned into lengths, all at instant 0. O(file).

    Prompts are 1.3 model tokens for each word or punctuation mark; outputs the same times 4 (alpaca: times 8), as
    reference outputs are shorter than a chat model's. ``app`` is the task.

    Raises:
        TraceError: As ``read_trace``.
    """
    arrivals = [_text_arrival(row) for row in read_rows(path)]
    cap = max(a.output_len for a in arrivals)
    return [_bounded(a, cap) for a in arrivals]


def count_tokens(text: str) -> int:
    """Word runs and single punctuation marks times 1.3, rounded up, at least 1: about what a model's tokens are."""
    return max(1, math.ceil(len(re.findall(r"\w+|[^\w\s]", text)) * TOKENS_PER_REGEX_TOKEN))


def read_rows(path: Path) -> Iterator[TraceRow]:
    """The records of a JSON-lines or CSV file, by the look of its first line. At least one, else ``TraceError``."""
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(str(path), 0, "the file is empty")
    if first[1].lstrip().startswith("{"):
        yield _json_row(path, *first)
        for number, line in lines:
            yield _json_row(path, number, line)
    else:
        yield from _csv_rows(path, first[1], lines)


def _parser(path: Path, row: TraceRow, format_name: str | None) -> Any:
    parsers = {"azure": _azure, "mooncake": _mooncake, "own": _own}
    name = format_name or _detect(row)
    if name not in parsers:
        raise TraceError(str(path), row.line, f"unknown format {name}; known: {', '.join(parsers)}")
    return parsers[name]


def _detect(row: TraceRow) -> str:
    if "hash_ids" in row.values:
        return "mooncake"
    if "arrived_at" in row.values or "prompt_len" in row.values:
        return "own"
    if {"input_tokens", "ContextTokens", "TIMESTAMP"} & set(row.values):
        return "azure"
    raise row.error(f"columns of no known format: {', '.join(sorted(row.values))}")


def _azure(row: TraceRow, app: str) -> SimRequest:
    """As published (TIMESTAMP, ContextTokens, GeneratedTokens) or with seconds and plain names."""
    if "TIMESTAMP" in row.values:
        return _arrival(row, _timestamp(row), "ContextTokens", "GeneratedTokens", app)
    return _arrival(row, row.seconds("arrival_s"), "input_tokens", "output_tokens", app)


def _mooncake(row: TraceRow, app: str) -> SimRequest:
    """As published (timestamp in ms, input_length, output_length) or with seconds and plain names."""
    if "timestamp" in row.values:
        arrival = _arrival(row, row.seconds("timestamp") / 1000, "input_length", "output_length", app)
    else:
        arrival = _arrival(row, row.seconds("arrival_s"), "input_tokens", "output_tokens", app)
    names = row.names("hash_ids")
    if len(names) != math.ceil(arrival.prompt_len / MOONCAKE_BLOCK):
        raise row.error(f"{len(names)} hash_ids for {arrival.prompt_len} prompt tokens in blocks of {MOONCAKE_BLOCK}")
    return replace(arrival, prefix=names)


def _own(row: TraceRow, app: str) -> SimRequest:
    given = row.values
    arrival = _arrival(row, row.seconds("arrived_at"), "prompt_len", "output_len", app)
    return replace(
        arrival,
        max_new_tokens=row.length("max_new_tokens") if "max_new_tokens" in given else 0,
        prefix=row.names("prefix") if "prefix" in given else (),
        app=row.text("app") if "app" in given else app,
        priority=row.integer("priority") if "priority" in given else 0,
        deadline_s=row.seconds("deadline_s") if given.get("deadline_s") is not None else None,
        tenant=row.text("tenant") if "tenant" in given else "",
        weight=row.weight() if "weight" in given else 1.0,
    )


def _arrival(row: TraceRow, arrived_at: float, prompt: str, output: str, app: str) -> SimRequest:
    # max_new_tokens 0 means unknown; ``_bounded`` fills it in once the whole file is read.
    prompt_len = row.length(prompt)
    images = row.images(prompt_len)
    client = str(row.values.get("client", ""))  # as ServeGen's files have it
    name = f"{app}-{row.line}"
    return SimRequest(name, arrived_at, prompt_len, row.length(output), 0, app=app, images=images, application=client)


def _timestamp(row: TraceRow) -> float:
    text = row.text("TIMESTAMP")
    try:
        return (datetime.fromisoformat(text) - datetime(1970, 1, 1)).total_seconds()
    except (TypeError, ValueError):
        raise row.error(f"TIMESTAMP is not a date and time: {text!r}") from None


def _text_arrival(row: TraceRow) -> SimRequest:
    task = row.text("task")
    prompt = row.text("instruction") + "\n" + row.text("user_input")
    stretch = OUTPUT_STRETCH.get(task, DEFAULT_STRETCH)
    output_len = math.ceil(stretch * count_tokens(row.text("output")))
    return SimRequest(row.text("id"), 0.0, count_tokens(prompt), output_len, 0, app=task)


def _bounded(arrival: SimRequest, cap: int) -> SimRequest:
    limit = arrival.max_new_tokens or cap
    return replace(arrival, max_new_tokens=limit, output_len=min(arrival.output_len, limit))


def _csv_rows(path: Path, header: str, lines: Iterator[tuple[int, str]]) -> Iterator[TraceRow]:
    columns = next(csv.reader([header]))
    num_rows = 0
    for number, line in lines:
        cells = next(csv.reader([line]))
        if len(cells) != len(columns):
            raise TraceError(str(path), number, f"{len(cells)} cells under {len(columns)} columns")
        num_rows += 1
        yield TraceRow(str(path), number, dict(zip(columns, cells, strict=True)))
    if not num_rows:
        raise TraceError(str(path), 1, "a header and nothing else")


def _json_row(path: Path, number: int, line: str) -> TraceRow:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(str(path), number, f"broken JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(values, dict):
        raise TraceError(str(path), number, "not a JSON object")
    return TraceRow(str(path), number, values)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Reads the lines that are not blank, stripped, each with its 1-based number; ``TraceError`` if it cannot."""
    number = 0
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else path.open("rb") as binary:
            for raw in binary:
                number += 1
                if line := raw.decode("utf-8").strip():
                    yield number, line
    except EOFError:
        raise TraceError(str(path), number + 1, "the gzip file is cut off") from None
    except UnicodeDecodeError:
        raise TraceError(str(path), number, "not UTF-8") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(str(path), number + 1, f"damaged gzip: {error}") from None
    except OSError as error:
        raise TraceError(str(path), 0, error.strerror or str(error)) from None


def _beside_repository() -> Path:
    return Path(__file__).resolve().parents[3] / "shared" / "data"
