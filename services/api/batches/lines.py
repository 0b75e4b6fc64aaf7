"""OpenAI's batch format: input lines, all checked before any request runs, and output lines."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from farsight.core.errors import InvalidValueError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request.

    Attributes:
        number: Line number in the file, from 1.
        custom_id: Unique in the file.
        url: One of ``URLS``.
        body: JSON as bytes, because the parsed bodies of a whole file would need several times the memory.
    """

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked input file.

    Attributes:
        path: The path of the file.
        sha256: Hash of its bytes in hex; decides whether saved progress belongs to this input.
        lines: In the order of the file; at least one.
    """

    path: Path
    sha256: str
    lines: tuple[BatchLine, ...]


@dataclass(frozen=True, slots=True)
class LineResult:
    """One line of output.

    Attributes:
        failed: Whether it holds an error or an answer with a status of 400 or more.
        data: The line as it is written, with its newline.
    """

    custom_id: str
    failed: bool
    data: bytes


def raw_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Splits an input into numbered lines, from 1, without the empty ones.

    Only "\\n" ends a line: other characters that Python takes for line ends may stand inside a JSON string.
    """
    return ((number, raw) for number, raw in enumerate(data.split(b"\n"), start=1) if raw.strip())


def read_batch(path: Path) -> Batch:
    """Reads the requests of a file. Keys that the format does not know are ignored.

    Raises:
        InvalidValueError: The file cannot be read or has no request, or a line is wrong; names line and field.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidValueError("IN", str(path), f"a readable file ({error.strerror})") from error
    checker = LineChecker(f"{path} ")
    lines = tuple(checker.line(number, raw) for number, raw in raw_lines(data))
    if not lines:
        raise InvalidValueError("IN", str(path), "a file with at least one request")
    return Batch(path, hashlib.sha256(data).hexdigest(), lines)


def answered(custom_id: str, status: int, request_id: str | None, body: bytes) -> LineResult:
    """The output line of a request that got an answer of any status.

    Args:
        status: The HTTP status.
        request_id: The service's id of the request; None draws one.
        body: JSON.
    """
    try:
        content = json.loads(body)
    except ValueError:
        return unsent(custom_id, "invalid_response", f"The service answered {status} with a body that is not JSON.")
    response = {"status_code": status, "request_id": request_id or f"req_{uuid.uuid4().hex}", "body": content}
    return _result(custom_id, status >= 400, response, None)


def unsent(custom_id: str, code: str, message: str) -> LineResult:
    """The output line of a request that got no answer."""
    return _result(custom_id, True, None, {"code": code, "message": message})


def read_result(data: bytes) -> LineResult | None:
    """Parses a written output line; None if it is damaged or incomplete."""
    if not data.endswith(b"\n"):
        return None
    try:
        fields = json.loads(data)
        response, custom_id = fields["response"], fields["custom_id"]
        failed = response is None or response["status_code"] >= 400
    except (ValueError, KeyError, TypeError):
        return None
    return LineResult(custom_id, failed, data) if isinstance(custom_id, str) else None


def _result(custom_id: str, failed: bool, response: dict[str, Any] | None, error: dict[str, str] | None) -> LineResult:
    """Encodes as ASCII with escapes, since an error may quote text that has no UTF-8 form."""
    fields = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return LineResult(custom_id, failed, json.dumps(fields, separators=(",", ":")).encode() + b"\n")


@dataclass(slots=True)
class LineChecker:
    """Checks the lines of one input, one after another; errors name the line and the field.

    Attributes:
        source: Stands before the line in errors.
        tier: The ``service_tier`` of the requests; empty leaves what the lines say.
    """

    source: str = ""
    tier: str = ""
    _first_uses: dict[str, int] = field(default_factory=dict)

    def line(self, number: int, raw: bytes) -> BatchLine:
        """Parses the next line.

        Raises:
            InvalidValueError: The line is wrong.
        """
        where = f"{self.source}line {number}"
        fields = _parse(where, raw)
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            _refuse(f"{where}, custom_id", custom_id, "a non-empty string")
        if custom_id in self._first_uses:
            expected = f"one that no other line has; line {self._first_uses[custom_id]} has it"
            _refuse(f"{where}, custom_id", custom_id, expected)
        if fields.get("method") != "POST":
            _refuse(f"{where}, method", fields.get("method"), "'POST'")
        url = fields.get("url")
        if url not in URLS:
            _refuse(f"{where}, url", url, " or ".join(map(repr, URLS)))
        body = fields.get("body")
        if not isinstance(body, dict):
            _refuse(f"{where}, body", body, "an object, the request as it would be sent to url")
        if body.get("stream") is True:
            _refuse(f"{where}, body.stream", True, "false or no such field; a batch keeps whole answers")
        if self.tier:
            body = {**body, "service_tier": self.tier}
        self._first_uses[custom_id] = number
        return BatchLine(number, custom_id, url, json.dumps(body, separators=(",", ":")).encode())


def _parse(where: str, raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode()
        fields = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        _refuse(where, raw, f"UTF-8; byte {error.start} is not")
    except json.JSONDecodeError as error:
        _refuse(where, text, f"a JSON object ({error.msg} at column {error.colno})")
    except RecursionError:
        _refuse(where, text, "a JSON object nested less deeply")
    except ValueError as error:
        _refuse(where, text, f"a JSON object ({error})")
    if not isinstance(fields, dict):
        _refuse(where, fields, "a JSON object")
    return fields


def _refuse(where: str, value: Any, expected: str) -> NoReturn:
    raise InvalidValueError(where, value, expected) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
