"""``farsight front URL [URL ...]``: stands before servers that run already."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from farsight.core.config.load import make_config
from farsight.core.errors import ConfigError, FarsightError, InvalidValueError
from farsight.services.api.access.access_control import API_KEY_VARIABLE
from farsight.services.commands.ask import ask
from farsight.services.launch.failures import failing_in_lines
from farsight.services.one_line_errors import naming_flags

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


FIRST_LOOK_S = 15.0
"""Default of the seconds for the answers of a server before the service starts."""

Say = Callable[[str], None]
Tables = dict[str, Any]


def front(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Servers of one model, as http://HOST:PORT.")],
    model: Annotated[str | None, typer.Option(help="Model, where the servers have several.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Directory, GGUF file or hub id of the model's tokenizer; default: the model's, if it is here."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests that each server computes at once; others wait here.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest sequence on a server, in tokens; default: as it reports.")
    ] = None,
    probe_timeout: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds for a server's answer to a probe; default: 15 before the start, then 10."),
    ] = None,
    upstream_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the servers' own API key.")
    ] = "",
    preset: Annotated[str | None, typer.Option(help="Scheduling preset; default: as for `farsight serve`.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on; default: 8000.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=API_KEY_VARIABLE, help="The one key that opens this front; never sent upstream."),
    ] = None,
) -> None:
    """Stand before other servers (vLLM, SGLang, llama.cpp, Ollama): queue, forecasts, limits, explanations."""
    with failing_in_lines("front"):
        from farsight.services.launch.launch import run_service
        from farsight.services.launch.signals import StopSignal

        key = _upstream_key(upstream_key_env)
        given = {
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "api_key_env": upstream_key_env or None,
            "probe_timeout_s": probe_timeout,
        }
        ask_server = partial(_ask, key, probe_timeout or FIRST_LOOK_S)
        tables = front_tables(urls, model, tokenizer, given, ask_server, typer.echo)
        flags = {"server": _given(host=host, port=port), "scheduler": _given(preset=preset)}
        if api_key is not None:
            os.environ[API_KEY_VARIABLE] = api_key  # Ingress replicas read it from there.
        with naming_flags(flags):
            run_service(make_config(tables | flags), typer.echo, StopSignal())
    typer.echo("Stopped.")


def front_tables(
    urls: list[str], model: str | None, tokenizer: str | None, given: dict[str, Any], ask_server: Ask, say: Say
) -> Tables:
    """The configuration that stands before the servers.

    Args:
        given: Settings of each ``[[replica]]``; None leaves one to what the server says.

    Raises:
        FarsightError: A server does not answer, or they have no model in common.
    """
    servers = [find_server(url, ask_server) for url in urls]
    name = common_model(servers, model)
    paths = [tokenizer or _tokenizer_here(each, name, ask_server) for each in servers]
    path = next((each for each in paths if each), "")
    replicas = [_replica(each, name, bool(path), given, ask_server, say) for each in servers]
    if not path:
        say(
            f"No tokenizer of {name} is on this machine, so another one counts tokens: lengths, forecasts, limits are"
            " estimates. Name the right one with --tokenizer DIR."
        )
    return {"model": {"path": path, "name": name}, "replica": replicas}


def _tokenizer_here(server: FoundServer, model: str, ask_server: Ask) -> str:
    """Where the server's own model is, if this machine has it. Our own server's embedded models are always here."""
    from farsight.services.launch.launch import EMBEDDED_MODEL, EMBEDDED_NAME, VISION_MODEL, VISION_NAME

    shipped = {EMBEDDED_NAME: EMBEDDED_MODEL, VISION_NAME: VISION_MODEL}
    if server.kind == "farsight" and model in shipped:
        return str(shipped[model])
    return local_path(server, model, ask_server)


def _replica(
    server: FoundServer, model: str, knows_tokens: bool, given: dict[str, Any], ask_server: Ask, say: Say
) -> dict[str, Any]:
    """The table of one server, and a line about it."""
    limits = find_limits(server, model, ask_server)
    found = {"max_model_len": limits.max_model_len or None, "max_num_seqs": limits.max_num_seqs or None}
    prompt = "tokens" if knows_tokens and server.kind in TAKES_TOKENS else "text"
    table = {"backend": "openai", "url": server.url, "prompt": prompt, **found}
    table |= _given(**given)
    shown = {field: value for field, value in table.items() if field in found and value is not None}
    guessed = limits.assumed and given.get("max_model_len") is None
    facts = [f"prompts as {prompt}", *(f"{field} {value}" for field, value in shown.items())]
    advice = " (the server does not say its longest sequence: correct it with --max-model-len)" if guessed else ""
    say(f"{server.url} is {server.name} and serves {model}: {', '.join(facts)}{advice}.")
    return _given(**table)


def _given(**settings: Any) -> Tables:
    """The settings that are not left open."""
    return {name: value for name, value in settings.items() if value is not None}


def _upstream_key(variable: str) -> str:
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError("--upstream-key-env", variable, "the name of an environment variable that holds a key")
    return key


def _ask(key: str, limit_s: float, server: str, path: str, body: dict[str, Any] | None = None) -> Any:
    try:
        return ask(server, path, limit_s, key, body)
    except FarsightError as error:
        if isinstance(error.__cause__, TimeoutError):
            raise FarsightError(f"{error}; --probe-timeout waits longer") from error
        raise
