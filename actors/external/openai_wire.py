"""What is said to an OpenAI-compatible server, and what it says: bodies, chunks, lists of models. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.errors import FarsightError
from core.request import PromptSource, Request, SamplingParams
from policies.external.events import Failure

MAX_SEED = 2**63 - 1
"""The largest that every server takes."""

MAX_MESSAGE = 300
"""Characters of a server's own words that are passed on."""

DONE = b"[DONE]"

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


class BackendFailed(FarsightError):
    """The other server did not do what it should."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


def failed(kind: str, message: str, *, trips: bool = False, of_request: bool = False) -> BackendFailed:
    return BackendFailed(Failure(kind, message, trips, of_request))


@dataclass(frozen=True, slots=True)
class Usage:
    """
    Attributes:
        cached_tokens: Of the prompt, that were not computed again; None where the server does not say.
    """

    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream; the last ones hold a finish reason and the usage."""

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class ListedModel:
    """
    Attributes:
        max_model_len: Tokens of prompt and output together; None where the server does not say (most do not).
    """

    name: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """What is posted where."""

    path: str
    body: dict[str, Any]


Decode = Callable[[Sequence[int], Sequence[int]], str]
"""The text of token ids that follow others."""


def by_tokens(request: Request, model: str) -> Call:
    """A completion of token ids, so that both sides mean the same.

    What has been put out by an earlier attempt goes with the prompt, and off the limits. Sampling is said in full,
    neutral values too: some servers have defaults of their own (vLLM the model's ``generation_config.json``). Who must
    not share cached prefixes here does not share them there either, where the server knows ``cache_salt`` (vLLM).
    """
    prompt = [*request.prompt_ids, *request.output_ids]
    body = {"model": model, "prompt": prompt, **_sampling(request), **_extensions(request)}
    if request.cache_salt:  # of a length that every server takes
        body["cache_salt"] = hashlib.blake2b(request.cache_salt.encode(), digest_size=16).hexdigest()
    return Call(COMPLETIONS, body)


def by_text(request: Request, model: str, decode: Decode) -> Call:
    """A chat or a completion as the client wrote it; OpenAI's own fields, and others only where they change something.

    Args:
        decode: Gives the texts of what came, or was put out, as token ids.

    Raises:
        BackendFailed: an answer to a chat that another replica has begun cannot go on.
    """
    source = request.source or PromptSource(decode(request.prompt_ids, ()))
    neutral = _extensions(replace(request, sampling=SamplingParams(request.sampling.max_new_tokens)))
    extensions = {name: value for name, value in _extensions(request).items() if neutral.get(name) != value}
    rest = {**_sampling(request), **extensions}
    if not source.messages:
        prompt = source.text + decode(request.output_ids, request.prompt_ids)
        return Call(COMPLETIONS, {"model": model, "prompt": prompt, **rest})
    if request.output_ids:
        message = "another replica began to answer this chat, and a server that takes text cannot go on with it"
        raise failed("request", message, of_request=True)
    messages = [{"role": role, "content": content} for role, content in source.messages]
    return Call(CHATS, {"model": model, "messages": messages, **rest})


def _sampling(request: Request) -> dict[str, Any]:
    """Fields that every server knows."""
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
    """Fields that vLLM has added, and others after it."""
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
    if sampling.min_tokens > len(request.output_ids):
        body["min_tokens"] = sampling.min_tokens - len(request.output_ids)
    return body


class EventReader:
    """Splits a stream of server-sent events into the data of each; events may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is complete now; comments and other fields are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def parse_chunk(data: bytes, model: str) -> Chunk:
    """One event of the stream of a completion, or of a chat.

    Raises:
        BackendFailed: it is none, tells of an error, or comes from another model.
    """
    body = _object(data)
    if body.get("error"):
        raise _told(body)
    name = body.get("model")
    if name is not None and name != model:
        raise failed("model", f"it answers as model {name!r}, not {model!r}", trips=True)
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        raise failed("protocol", f"a chunk without one choice: {_short(data)}")
    usage = _usage(body.get("usage"))
    if not choices:
        return Chunk("", None, usage)
    choice = choices[0] if isinstance(choices[0], dict) else {"text": choices[0]}
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    reason = choice.get("finish_reason")
    if not isinstance(text, str | None) or not isinstance(reason, str | None):
        raise failed("protocol", f"a chunk without text: {_short(data)}")
    return Chunk(text or "", reason, usage)


def _told(body: dict[str, Any]) -> BackendFailed:
    """An error in the midst of a stream; some servers say there what the status could not say any more (vLLM)."""
    error = body["error"]
    message = f"the server says: {error_message(body)}"
    code = error.get("code") if isinstance(error, dict) else None
    refused = code in (400, 422)
    return failed("request" if refused else "broken", message, of_request=refused)


def _usage(raw: Any) -> Usage | None:
    """As far as it can be understood; a server may leave it out."""
    if not isinstance(raw, dict) or type(raw.get("completion_tokens")) is not int:
        return None
    details = raw.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(raw["completion_tokens"], cached if type(cached) is int else None)


def find_model(data: bytes, model: str) -> ListedModel:
    """The model of that name in the answer to ``GET /v1/models``.

    Raises:
        BackendFailed: the list cannot be understood, or does not hold it.
    """
    listed = _object(data).get("data")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise failed("protocol", f"no list of models: {_short(data)}")
    for each in listed:
        if each.get("id") == model:
            length = each.get("max_model_len")
            return ListedModel(model, length if type(length) is int and length > 0 else None)
    names = ", ".join(repr(each.get("id")) for each in listed) or "none"
    raise failed("model", f"it serves {names[:MAX_MESSAGE]}, not {model!r}", trips=True)


def refusal(status: int, data: bytes, *, may_lack: bool = False) -> Failure:
    """What a reply other than 200 means.

    Args:
        may_lack: A server may do without what was asked for.
    """
    message = f"HTTP {status}: {_words(data)}"
    if status in (401, 403):
        return Failure("auth", message, trips=True)
    if status == 404 and not may_lack:
        return Failure("model", message, trips=True)
    if status in (429, 503):
        return Failure("busy", message)
    if 400 <= status < 500:
        return Failure("request", message, of_request=True)
    return Failure("http", message)


def error_message(body: dict[str, Any]) -> str:
    """What an error object says: OpenAI's, or the plain ones of older servers."""
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
        raise failed("protocol", f"no JSON object: {_short(data)}")
    return body


def _short(data: bytes) -> str:
    return data[:MAX_MESSAGE].decode(errors="replace").strip() or "an empty reply"
