"""``farsight front URL [URL ...]``: stands before servers that run already."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from core.config.load import make_config
from core.errors import ConfigError, FarsightError
from services.api.access.access_control import API_KEY_VARIABLE
from services.commands.ask import ask
from services.commands.front_servers import (
    TAKES_TOKENS,
    Ask,
    FoundServer,
    common_model,
    find_limits,
    find_server,
    local_path,
)
from services.launch.failures import failing_in_lines
from services.one_line_errors import naming_flags

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
        from services.launch.launch import run_service
        from services.launch.signals import StopSignal

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
    from services.launch.launch import EMBEDDED_MODEL, EMBEDDED_NAME, VISION_MODEL, VISION_NAME

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
