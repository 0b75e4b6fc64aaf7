"""Asks servers what they are, so that they can be replicas: the protocol's quirks, the model, its longest sequence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from core.errors import FarsightError, InvalidValueError

TAKES_TOKENS = ("farsight", "vllm", "sglang", "llamacpp")
"""Servers, by ``owned_by`` in their list of models, that take a prompt as token ids."""

OLLAMA_CONTEXT = 4096
"""Ollama's own default of a sequence's length, where it has not loaded the model yet (its FAQ, "context window")."""

UNKNOWN_CONTEXT = 4096
"""Assumed where a server does not say."""


class Ask(Protocol):
    """Asks a server; raises FarsightError where it refuses or does not answer."""

    def __call__(self, server: str, path: str, body: dict[str, Any] | None = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class FrontedModel:
    """A model as a server lists it.

    Attributes:
        root: The path or hub id that it was loaded from; empty where the server does not say.
        reports_length: The server lists the longest sequence with it.
    """

    root: str
    reports_length: bool


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server before which Farsight may stand.

    Attributes:
        url: Its address, without ``/v1``.
        kind: ``owned_by`` of its models: ``vllm``, ``llamacpp``, ``library`` (Ollama), ...
        models: By name.
    """

    url: str
    kind: str
    models: dict[str, FrontedModel]

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return {"library": "Ollama", "llamacpp": "llama.cpp"}.get(self.kind, self.kind or "a server")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server can bear; 0 leaves it to what the replica finds by itself, or to its default.

    Attributes:
        max_model_len: Tokens of prompt and output together.
        max_num_seqs: Requests that it computes at once.
        assumed: The length is a guess.
    """

    max_model_len: int = 0
    max_num_seqs: int = 0
    assumed: bool = False


def find_server(url: str, ask: Ask) -> FoundServer:
    """The server at an address, by its list of models.

    Raises:
        FarsightError: No server answers, or its answer is no list of models.
    """
    base = url.rstrip("/").removesuffix("/v1")
    listed = _field(ask(base, "/v1/models"), "data")
    if not isinstance(listed, list):
        raise FarsightError(f"{base}/v1/models is no list of models; is this an OpenAI-compatible server?")
    models = [each for each in listed if isinstance(each, dict) and isinstance(each.get("id"), str)]
    kinds = [each["owned_by"] for each in models if isinstance(each.get("owned_by"), str)]
    found = {
        each["id"]: FrontedModel(_text(each.get("root")), _count(each.get("max_model_len")) > 0) for each in models
    }
    return FoundServer(base, kinds[0] if kinds else "", found)


def common_model(servers: list[FoundServer], wanted: str | None) -> str:
    """The model that all servers serve.

    Raises:
        InvalidValueError: There is none, several where none was chosen, or the chosen one is missing somewhere.
    """
    names = [name for name in servers[0].models if all(name in each.models for each in servers)]
    served = "; ".join(f"{each.url} serves {', '.join(each.models) or 'no model'}" for each in servers)
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted in names:
        return wanted
    raise InvalidValueError("--model", wanted, f"one model that all of them serve ({served})")


def find_limits(server: FoundServer, model: str, ask: Ask) -> Limits:
    """What a server bears, asked in its own way. vLLM, SGLang and Farsight list the length with the model."""
    if server.models[model].reports_length:
        return Limits()
    if server.kind == "llamacpp":
        return _of_llama_cpp(_optional(ask, server.url, "/props"))
    if server.kind == "library":
        return _of_ollama(_optional(ask, server.url, "/api/ps"), model)
    return Limits(UNKNOWN_CONTEXT, assumed=True)


def local_path(server: FoundServer, model: str, ask: Ask) -> str:
    """Where the server's model lies on this machine; empty where it does not, or the server does not say."""
    root = server.models[model].root
    if server.kind == "llamacpp":
        root = _text(_field(_optional(ask, server.url, "/props"), "model_path"))
    return root if Path(root).is_absolute() and Path(root).exists() else ""


def _of_llama_cpp(props: Any) -> Limits:
    """``/props``: the context of a slot, and the number of slots."""
    length = _count(_field(_field(props, "default_generation_settings"), "n_ctx"))
    return Limits(length or UNKNOWN_CONTEXT, _count(_field(props, "total_slots")), assumed=not length)


def _of_ollama(running: Any, model: str) -> Limits:
    """``/api/ps``: the context of a loaded model. By default Ollama computes one request at a time."""
    loaded = _field(running, "models")
    for each in loaded if isinstance(loaded, list) else ():
        if _field(each, "model") == model or _field(each, "name") == model:
            length = _count(_field(each, "context_length"))
            return Limits(length or OLLAMA_CONTEXT, 1, assumed=not length)
    return Limits(OLLAMA_CONTEXT, 1, assumed=True)


def _optional(ask: Ask, url: str, path: str) -> Any:
    """The answer, or None from a server that has no such page."""
    try:
        return ask(url, path)
    except FarsightError:
        return None


def _field(body: Any, name: str) -> Any:
    return body.get(name) if isinstance(body, dict) else None


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
