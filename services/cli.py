"""The ``farsight`` command."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farsight.core.config.load import load_config
from farsight.core.errors import ConfigError
from farsight.services.bench.command import bench
from farsight.services.commands.advise import advise
from farsight.services.commands.ask import KEY_VARIABLE, ApiKeyOption, JsonOption, ask, key_for
from farsight.services.commands.evaluate import evaluate
from farsight.services.commands.explain import explain
from farsight.services.commands.front import front
from farsight.services.commands.keys import KeyFileOption, keys
from farsight.services.commands.profile import profile
from farsight.services.commands.pull import fetch_missing, models, pull
from farsight.services.commands.replay import replay
from farsight.services.commands.simulate import compare, simulate
from farsight.services.commands.train import train
from farsight.services.demo.command import demo
from farsight.services.launch.failures import failing_in_lines
from farsight.services.launch.machine import check_own_gpus
from farsight.services.one_line_errors import OneLineErrors, failing_in_one_line, naming_flags
from farsight.services.server_address import HostOption, PortOption, UrlOption, address_of

if TYPE_CHECKING:
    from farsight.services.commands.scaling import ServerChange

STATUS_TIMEOUT_S = 5.0

MEASURED_S = 2.0
"""So long ``farsight status`` watches what the processes use."""

ModelOption = typer.Option(
    help="Name that `farsight models` lists, directory, GGUF file or hub id; default: the embedded model."
)

app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"farsight {importlib.metadata.version('farsight')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve large language models, looking ahead."""


@app.command()
def serve(
    name: Annotated[str | None, typer.Argument(help="The model, as in --model.")] = None,
    model: Annotated[str | None, ModelOption] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that clients ask for; several times for several names.")
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="File of a chat template, not the model's own.")] = None,
    tool_format: Annotated[
        str | None, typer.Option(help="How the model writes tool calls; default: found from the chat template.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, or emulated:PROFILE (takes a device's time, computes nothing); default: cpu."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; flags override it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: 8000.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Bits of the weights: full, float, int8 or int4; default: what the preset says.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Type of keys and values: auto (the model's) or int8; default: auto.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV pool, as 512MiB or 2GiB; default: auto.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence, in tokens; default: the model's context.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads of a replica; default: the cores but one, shared by replicas.")
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option("--prefix-cache/--no-prefix-cache", help="Share the KV of equal prompt prefixes."),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Scheduling preset; default: fcfs.")] = None,
    execution: Annotated[
        str | None,
        typer.Option(help="How formed batches run: ragged (the default), or static (padded, returned together)."),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Number of model replicas; default: 1.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Number of processes that share each layer; default: 1.")
    ] = None,
    pipeline_parallel: Annotated[int | None, typer.Option(help="Number of pipeline stages; default: 1.")] = None,
    expert_parallel: Annotated[
        bool | None,
        typer.Option(
            "--expert-parallel",
            help="With --tensor-parallel: each process has some of a mixture's experts, not a share of every expert.",
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(help="Most replicas that autoscaling by predicted queue delay may start; default: --replicas."),
    ] = None,
    placement: Annotated[
        str | None, typer.Option(help="Which components share a process: auto, fused, split or packed.")
    ] = None,
    predictor: Annotated[
        Path | None,
        typer.Option(help="Output-length predictor written by `farsight train`; default: history of recent outputs."),
    ] = None,
    predictor_encoder: Annotated[
        str | None,
        typer.Option(
            help="Text encoder of the predictor: directory, hub id, minilm (offline) or auto; behind "
            "sentence-transformers: that library computes it. Default: that of its training, or none."
        ),
    ] = None,
    proxy: Annotated[str | None, typer.Option(help="HTTP proxy: auto, serve or haproxy.")] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="Seconds that open requests have to end after TERM; default: 30.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="Lines of the log: text, or json (an object a line); default: text.")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(help="Least level of its lines: warning, info or debug (what a start costs); default: warning."),
    ] = None,
    access_log: Annotated[
        bool | None, typer.Option("--access-log", help="A line for each request, with the id of its answer.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, help="The one key that opens this server, besides those of --key-file."),
    ] = None,
    key_file: KeyFileOption = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Serve without keys on an address that other machines reach.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="TLS certificate chain in PEM; serves HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of --tls-cert in PEM.")] = None,
    allow_image_urls: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,...",
            help="Hosts that pictures may be fetched from, as pictures.example.org or HOST:PORT; default: none.",
        ),
    ] = None,
    benchmark_mode: Annotated[
        bool | None,
        typer.Option(
            "--benchmark-mode",
            help="To measure: requests may set exact output lengths, and no queue is too long.",
        ),
    ] = None,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API until Ctrl-C, or until TERM and the end of open requests."""
    overrides: dict[str, dict[str, Any]] = {
        "model": {
            "path": model or name,
            "name": served_model_name[0] if served_model_name else None,
            "also_named": ",".join(served_model_name[1:]) if served_model_name and served_model_name[1:] else None,
            "chat_template": None if chat_template is None else str(chat_template),
            "tool_format": tool_format,
            "dtype": dtype,
            "replicas": replicas,
            "tensor_parallel": tensor_parallel,
            "pipeline_parallel": pipeline_parallel,
            "expert_parallel": expert_parallel,
            "max_replicas": max_replicas,
        },
        "engine": {
            "device": device,
            "weights": weights,
            "kv_dtype": kv_dtype,
            "kv_memory": kv_memory,
            "max_model_len": max_model_len,
            "num_threads": threads,
            "prefix_cache": prefix_cache,
            "benchmark_mode": benchmark_mode,
        },
        "scheduler": {"preset": preset, "execution": execution},
        "server": {
            "host": host,
            "port": port,
            "proxy": proxy,
            "drain_s": drain_s,
            "log_format": log_format,
            "log_level": log_level,
            "access_log": access_log,
        },
        "access": {
            "key_file": None if key_file is None else str(key_file),
            "insecure": insecure,
            "tls_cert": None if tls_cert is None else str(tls_cert),
            "tls_key": None if tls_key is None else str(tls_key),
        },
        "actors": {"placement": placement},
        "images": {"allow_urls": allow_image_urls},
        "predictor": {"artefact": None if predictor is None else str(predictor), "encoder": predictor_encoder},
    }
    if api_key is not None:
        os.environ[KEY_VARIABLE] = api_key  # Ingress replicas read it from there, as they do under `serve deploy`.
    with failing_in_lines("serve"), naming_flags(overrides):
        if name is not None and model is not None:
            raise ConfigError("--model", model, f"none beside the model {name!r}")
        settings = load_config(config, overrides)
        check_own_gpus(settings)  # before the imports of what starts a server, which take over a second
        from farsight.services.launch.failures import in_format
        from farsight.services.launch.launch import run_service
        from farsight.services.launch.signals import StopSignal

        say = in_format(typer.echo, settings.server.log_format)
        fetch_missing(settings.model.path, say, quiet=settings.server.log_format != "text")
        run_service(settings, say, StopSignal())
    say("Stopped.")


@app.command()
def status(
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every logical component of a running server."""
    with failing_in_one_line():
        server = address_of(url, host, port)
        key = key_for(server, api_key)
        body = ask(server, "/status", STATUS_TIMEOUT_S, key)
        if not as_json:
            time.sleep(MEASURED_S)
            before, body = body["processes"], ask(server, "/status", STATUS_TIMEOUT_S, key)
    if as_json:
        typer.echo(json.dumps(body))
    else:
        if body["emulated"]:
            typer.echo(f"Emulated device ({body['emulated']}): answers are made up.")
        if body["queue_delay_s"] is not None:
            typer.echo(f"Predicted queue delay for a new request: {body['queue_delay_s']:.2f} s")
        _print_status(body["actors"], body["learned"])
        print_processes(before, body["processes"], body["actors"])


def _print_table(headers: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table, unless it has no rows."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*headers)
    for row in rows:
        table.add_row(*map(str, row))
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a pipe has no width; cells would be cut
    if table.row_count:
        console.print(table)


def _print_status(actors: list[dict[str, Any]], learned: list[dict[str, Any]]) -> None:
    rows = []
    for row in actors:
        age = row["last_step_age_s"]
        shown = "-" if age is None else f"{age:.1f} s ago"
        state = "degraded" if row["degraded"] and row["state"] == "ready" else row["state"]
        rows.append((row["name"], row["kind"], row["pid"], row["node"], state, row["queue"], shown))
    _print_table(("name", "kind", "pid", "node", "state", "queue", "last step"), rows)
    _print_table(("degraded", "reason"), ((row["name"], row["degraded"]) for row in actors if row["degraded"]))
    replaced = ((row["name"], row["restarts"], row["last_end"]) for row in actors if row["last_end"])
    _print_table(("replaced", "times", "last reason"), replaced)
    servers = ((row["name"], row["url"], row["breaker"]) for row in actors if row["url"])
    _print_table(("replica", "server URL", "breaker"), servers)
    versions = []
    for row in learned:
        score = "-" if row["score"] is None else f"{row['score']:.4g}"
        at = f"{datetime.fromtimestamp(row['created_at']):%Y-%m-%d %H:%M:%S}"
        used = "yes" if row["current"] else ""
        versions.append((row["kind"], row["version"], score, row["num_examples"], at, used))
    _print_table(("learned while serving", "version", "score", "examples", "created at", "in use"), versions)


def print_processes(before: list[dict[str, Any]], after: list[dict[str, Any]], actors: list[dict[str, Any]]) -> None:
    """Prints what each process used between two looks ``MEASURED_S`` apart, and its memory."""
    if not after:
        return
    spent = {row["pid"]: row["cpu_s"] for row in before}
    shares = [max(0.0, row["cpu_s"] - spent.get(row["pid"], row["cpu_s"])) / MEASURED_S for row in after]
    rows = []
    for share, row in sorted(zip(shares, after, strict=True), key=lambda pair: -pair[1]["memory_bytes"]):
        hosted = ", ".join(actor["name"] for actor in actors if actor["pid"] == row["pid"])
        rows.append((row["name"], row["pid"], hosted, f"{share:.1%}", f"{row['memory_bytes'] / 2**20:.0f}"))
    memory = sum(row["memory_bytes"] for row in after) / 2**20
    rows.append(("all", "", "", f"{sum(shares):.1%}", f"{memory:.0f}"))
    _print_table(("process", "pid", "components", "of a core", "memory, MiB"), rows)


TokenOption = Annotated[str | None, typer.Option(help="Admin token; default: FARSIGHT_ADMIN_TOKEN, or the run file's.")]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(envvar=KEY_VARIABLE, help="API key with the role admin, where no admin token is known."),
]


@app.command()
def scale(
    kind: Annotated[
        str, typer.Argument(help="replica, length-predictor, serving-time-estimator, image-encoder or ingress.")
    ],
    count: Annotated[int, typer.Argument(min=0, help="Wanted number of them.")],
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    url: UrlOption = None,
    token: TokenOption = None,
    api_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the number of components of one kind while the server runs."""
    from farsight.services.commands.scaling import scale_service

    with failing_in_one_line():
        server = address_of(url, host, port)
        _say(scale_service(server, _admin_key(server, token, api_key), kind, count), as_json)


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="Number of the replica, as in worker-NUMBER of `farsight status`.")],
    cancel: Annotated[bool, typer.Option("--cancel", help="Let it take requests again.")] = False,
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    url: UrlOption = None,
    token: TokenOption = None,
    api_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a replica out of a running server: its requests end or move, then its processes end."""
    from farsight.services.commands.scaling import drain_replica

    with failing_in_one_line():
        server = address_of(url, host, port)
        _say(drain_replica(server, _admin_key(server, token, api_key), replica, cancel=cancel), as_json)


@app.command()
def upgrade(
    model: Annotated[
        str | None, typer.Option(help="Directory of the new weights; the tokenizer must be the running one.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="File of settings; those that the workers of a replica read may differ.")
    ] = None,
    surge: Annotated[
        bool, typer.Option("--surge/--no-surge", help="Run one more replica meanwhile, so that no request waits.")
    ] = True,
    drain_s: Annotated[
        float, typer.Option(min=0, help="Seconds that the last requests on the old weights may take; the rest ends.")
    ] = 600.0,
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    url: UrlOption = None,
    token: TokenOption = None,
    api_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace the weights of a running server, or settings; every stream ends on the weights that it began with."""
    from farsight.services.commands.scaling import upgrade_service

    with failing_in_one_line():
        server = address_of(url, host, port)
        key = _admin_key(server, token, api_key)
        _say(upgrade_service(server, key, model, config, surge=surge, drain_s=drain_s), as_json)


def _admin_key(server: str, token: str | None, api_key: str | None) -> str:
    return token or key_for(server, None) or api_key or ""


def _say(change: ServerChange, as_json: bool) -> None:
    """Prints what has changed on a running server."""
    typer.echo(json.dumps(change.result) if as_json else change.line)


@app.command()
def down(
    address: Annotated[str, typer.Option(help="Address of the Ray cluster, as HOST:PORT.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """End all parts of Farsight that `serve deploy` started in a Ray cluster."""
    from farsight.services.commands.down import end_service

    with failing_in_one_line():
        ended = end_service(address, lambda line: typer.echo(line, err=as_json))
    if as_json:
        typer.echo(json.dumps({"ended": ended}))


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests in OpenAI's batch format, one per line.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Output file for the answers, in the order of IN.")],
    address: Annotated[
        str | None,
        typer.Option(help="Dashboard of a Ray cluster, as http://host:8265; default: a private cluster here."),
    ] = None,
    model: Annotated[str | None, ModelOption] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; flags override it.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at once.")] = 64,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a file of requests as a Ray job. After an early end, the same command resumes it."""
    from farsight.services.batch.submit import BatchOptions, count_answers, submit

    options = BatchOptions(model, config, concurrency, overwrite)
    with failing_in_lines("batch"):
        # Check the settings before anything starts.
        patience_s = load_config(config, {"model": {"path": model}}).server.start_patience_s
        if model is not None and address is None:
            fetch_missing(model, functools.partial(typer.echo, err=True), quiet=as_json)
        say = functools.partial(typer.echo, nl=False, err=as_json)
        exit_status = submit(source, target, address, options, say, patience_s)
        if as_json and not exit_status:
            typer.echo(json.dumps({"output": str(target), **count_answers(target)}))
    raise typer.Exit(exit_status)


app.add_typer(keys, name="keys")
app.command()(bench)
app.command()(explain)
app.command()(front)
app.command()(models)
app.command()(pull)
app.command()(demo)
app.command()(profile)
app.command()(simulate)
app.command()(compare)
app.command()(replay)
app.command()(advise)
app.command()(train)
app.command()(evaluate)

if __name__ == "__main__":
    app()
