"""A server under load, and the format of the requests sent to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from farsight.services.bench.requests import BenchRequest

Endpoint = Literal["completions", "chat"]
PATHS: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A server.

    Attributes:
        label: Its name in tables.
        base_url: With or without ``/v1``.
        model: The model's name there.
        server_pid: Root of its process tree, if its CPU time is to be measured.
        api_key: Sent as a bearer token.
        max_model_len: Most tokens of prompt and output together, as the server lists it; 0 if it does not.
    """

    label: str
    base_url: str
    model: str
    server_pid: int | None = None
    api_key: str | None = field(default=None, repr=False)
    max_model_len: int = 0

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        authorization = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **authorization}


@dataclass(frozen=True, slots=True)
class BodyForm:
    """The format in which a request is sent.

    Attributes:
        vocab_size: Prompts are sent as token ids below it; None sends text.
        top_p: Sent, and a seed for each request, where the temperature is above 0.
        ignore_eos: Ask for the full length (an extension that vLLM, SGLang and Farsight know).
        usage: Ask for ``usage`` at the end of the stream.
        hidden_max_tokens: Sent as ``max_tokens`` of every request; the true length goes in ``benchmark_len``, so that
            the server's scheduler cannot read it. None sends the true length as ``max_tokens``.
        extra: Additional fields of the body.
    """

    endpoint: Endpoint = "completions"
    vocab_size: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = True
    usage: bool = True
    hidden_max_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """A request, ready to be sent.

    Attributes:
        exact: Whether the answer must have exactly ``output_tokens`` tokens.
    """

    id: int
    kind: str
    body: bytes
    output_tokens: int
    exact: bool


def make_call(request: BenchRequest, model: str, form: BodyForm, salt: int, most_tokens: int | None = None) -> Call:
    """Encodes a request as a call.

    Args:
        salt: Each salt gives another prompt of the same length.
        most_tokens: Limit of the output for warm-up calls.
    """
    output_tokens = min(request.output_tokens, most_tokens or request.output_tokens)
    body: dict[str, Any] = {"model": model, **_prompt(request, form, salt)}
    body |= {"max_tokens": output_tokens, "temperature": form.temperature, "stream": True}
    if form.temperature > 0:
        body |= {"top_p": form.top_p, "seed": form.seed + request.id}
    if form.hidden_max_tokens is not None:
        body |= {"max_tokens": form.hidden_max_tokens, "benchmark_len": output_tokens}
    if form.ignore_eos:
        body["ignore_eos"] = True
    if form.usage:
        body["stream_options"] = {"include_usage": True}
    data = json.dumps(body | dict(form.extra), separators=(",", ":")).encode()
    return Call(request.id, request.kind, data, output_tokens, exact=form.ignore_eos)


def _prompt(request: BenchRequest, form: BodyForm, salt: int) -> dict[str, Any]:
    if form.endpoint == "chat":
        messages = (*request.before, ("user", request.prompt_text(salt)))
        return {"messages": [{"role": role, "content": content} for role, content in messages]}
    if form.vocab_size is None:
        return {"prompt": request.prompt_text(salt)}
    return {"prompt": request.prompt_ids(form.vocab_size, salt)}
