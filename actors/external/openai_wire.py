"""Encodes requests to an OpenAI-compatible server and parses its replies: bodies, chunks, model lists. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from farsight.core.errors import FarsightError
from farsight.core.request import PromptSource, Request, SamplingParams
from farsight.policies.external.events import ServerFailure

MAX_SEED = 2**63 - 1
"""The largest seed that every server accepts."""

MAX_MESSAGE = 300
"""Most characters of a server's error text that are passed on."""

MAX_EVENT_BYTES = 1 << 20
"""Most bytes of an event of a stream."""

DONE = b"[DONE]"

ABORTED = "abort"
"""Finish reason of vLLM and SGLang for an output that the server itself has broken off."""

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


class BackendFailed(FarsightError):
    """The external server did not do what it was asked to do."""

    def __init__(self, failure: ServerFailure) -> None:
        self.failure = failure
        super().__init__(failure.message)


def failed(kind: str, message: str, *, trips: bool = False, of_request: bool = False) -> BackendFailed:
    return BackendFailed(ServerFailure(kind, message, trips, of_request))


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts that the server reports.

    Attributes:
        cached_tokens: Prompt tokens that the server did not compute again; None if it does not report them.
    """

    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream; the last ones hold a finish reason and the usage."""

    text: str
    finish_reason: str | None = None
    usage: TokenUsage | None = None


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in the answer to ``GET /v1/models``.

    Attributes:
        max_model_len: Most tokens of prompt and output together; None if the server does not report it (most do not).
    """

    name: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class ServerCall:
    """Path and body of a POST request, and the trace that it belongs to, if any."""

    path: str
    body: dict[str, Any]
    traceparent: str = ""


Decode = Callable[[Sequence[int], Sequence[int]], str]
"""(preceding token ids, token ids) -> text of the second ids."""


def _traceparent(request: Request) -> str:
    return "" if request.origin is None else request.origin.traceparent


def by_tokens(request: Request, model: str) -> ServerCall:
    """Makes a completion request whose prompt is token ids, so that both sides mean the same tokens.

    The output of an earlier attempt is appended to the prompt and subtracted from the limits. All sampling parameters
    are sent, neutral values too, because some servers have other defaults (vLLM takes them from the model's
    ``generation_config.json``). Requests that must not share cached prefixes here do not share them there either, if
    the server supports ``cache_salt`` (vLLM).
    """
    prompt = [*request.prompt_ids, *request.output_ids]
    body = {"model": model, "prompt": prompt, **_sampling(request), **_extensions(request)}
    if request.cache_salt:  # hashed to a length that every server takes
        body["cache_salt"] = hashlib.blake2b(request.cache_salt.encode(), digest_size=16).hexdigest()
    return ServerCall(COMPLETIONS, body, _traceparent(request))


def by_text(request: Request, model: str, decode: Decode) -> ServerCall:
    """Makes a chat or completion request from the client's text: OpenAI's own fields, and extensions if not neutral.

    Args:
        decode: Decodes a prompt that came as token ids, and output of an earlier attempt.

    Raises:
        BackendFailed: Another replica has begun to answer this chat; a server that takes text cannot continue it.
    """
    source = request.source or PromptSource(decode(request.prompt_ids, ()))
    neutral = _extensions(replace(request, sampling=SamplingParams(request.sampling.max_new_tokens)))
    extensions = {name: value for name, value in _extensions(request).items() if neutral.get(name) != value}
    rest = {**_sampling(request), **extensions}
    if not source.messages:
        prompt = source.text + decode(request.output_ids, request.prompt_ids)
        return ServerCall(COMPLETIONS, {"model": model, "prompt": prompt, **rest}, _traceparent(request))
    if request.output_ids:
        message = "another replica began to answer this chat; a server that takes text cannot continue it"
        raise failed("request", message, of_request=True)
    messages = [{"role": role, "content": content} for role, content in source.messages]
    return ServerCall(CHATS, {"model": model, "messages": messages, **rest}, _traceparent(request))


def _sampling(request: Request) -> dict[str, Any]:
    """Makes the fields that every server supports."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens - len(request.output_ids),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not sampling.greedy:
        body["seed"] = sampling.seed & MAX_SEED
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    return body


def _extensions(request: Request) -> dict[str, Any]:
    """Makes the fields that vLLM has added and other servers have copied."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.shown_ids:
        body["skip_special_tokens"] = False
    if sampling.min_tokens > len(request.output_ids):
        body["min_tokens"] = sampling.min_tokens - len(request.output_ids)
    return body


class EventReader:
    """Splits a stream of server-sent events into the data of each; events may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the data of each event that ``data`` completes; skips comments and other fields.

        Raises:
            BackendFailed: An event has no end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise failed("broken", f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def parse_chunk(data: bytes, model: str) -> Chunk:
    """Parses one event of the stream of a completion or chat.

    Raises:
        BackendFailed: The event is malformed, reports an error, or comes from another model.
    """
    body = _object(data)
    if body.get("error"):
        raise _told(body)
    name = body.get("model")
    if name is not None and name != model:
        raise failed("model", f"the server answers as model {name!r}, expected {model!r}", trips=True)
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        raise failed("protocol", f"expected a chunk with exactly one choice, got {_short(data)}")
    usage = _usage(body.get("usage"))
    if not choices:
        return Chunk("", None, usage)
    choice = choices[0] if isinstance(choices[0], dict) else {"text": choices[0]}
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    reason = choice.get("finish_reason")
    if not isinstance(text, str | None) or not isinstance(reason, str | None):
        raise failed("protocol", f"expected a chunk with text, got {_short(data)}")
    if reason == ABORTED:
        raise failed("broken", "the server has aborted the request")
    return Chunk(text or "", reason, usage)


def _told(body: dict[str, Any]) -> BackendFailed:
    """Reads an error event in a stream. Some servers (vLLM) report there what the HTTP status can no longer tell."""
    error = body["error"]
    message = f"the server reports: {error_message(body)}"
    code = error.get("code") if isinstance(error, dict) else None
    refused = code in (400, 422)
    return failed("request" if refused else "broken", message, of_request=refused)


def _usage(raw: Any) -> TokenUsage | None:
    """Returns the usage, as far as it is well formed; None without a count of completion tokens."""
    if not isinstance(raw, dict) or type(raw.get("completion_tokens")) is not int:
        return None
    details = raw.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(raw["completion_tokens"], cached if type(cached) is int else None)


def find_model(data: bytes, model: str) -> ListedModel:
    """Finds the model of that name in the answer to ``GET /v1/models``.

    Raises:
        BackendFailed: The list is malformed, or does not name the model.
    """
    listed = _object(data).get("data")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise failed("protocol", f"expected a list of models, got {_short(data)}")
    for each in listed:
        if each.get("id") == model:
            length = each.get("max_model_len")
            return ListedModel(model, length if type(length) is int and length > 0 else None)
    names = ", ".join(repr(each.get("id")) for each in listed) or "none"
    raise failed("model", f"the server serves {names[:MAX_MESSAGE]}, expected {model!r}", trips=True)


def refusal(status: int, data: bytes, *, may_lack: bool = False) -> ServerFailure:
    """Returns the fault behind a reply whose status is not 200.

    Args:
        may_lack: The requested path is optional for a server.
    """
    message = f"HTTP {status}: {_words(data)}"
    if status in (401, 403):
        return ServerFailure("auth", message, trips=True)
    if status == 404 and not may_lack:
        return ServerFailure("model", message, trips=True)
    if status in (429, 503):
        return ServerFailure("busy", message)
    if 400 <= status < 500:
        return ServerFailure("request", message, of_request=True)
    return ServerFailure("http", message)


def error_message(body: dict[str, Any]) -> str:
    """Returns the message of an error object, in OpenAI's form or in the plain form of older servers."""
    error = body.get("error")
    if isinstance(error, dict):
        error = error.get("message")
    return str(error or body.get("message") or body.get("detail") or body)[:MAX_MESSAGE]


def _words(data: bytes) -> str:
    try:
        body = json.loads(data)
    except ValueError:
        return _short(data)
    return error_message(body) if isinstance(body, dict) else _short(data)


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise failed("protocol", f"expected a JSON object, got {_short(data)}")
    return body


def _short(data: bytes) -> str:
    return data[:MAX_MESSAGE].decode(errors="replace").strip() or "an empty reply"
