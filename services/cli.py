"""The ``farsight`` command."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farsight.core.config.load import load_config
from farsight.services.bench.command import bench
from farsight.services.commands.advise import advise
from farsight.services.commands.ask import KEY_VARIABLE, JsonOption, key_for
from farsight.services.commands.cache import cache
from farsight.services.commands.evaluate import evaluate
from farsight.services.commands.explain import explain
from farsight.services.commands.front import front
from farsight.services.commands.keys import keys
from farsight.services.commands.profile import profile
from farsight.services.commands.pull import fetch_missing, models, pull
from farsight.services.commands.replay import replay
from farsight.services.commands.simulate import compare, simulate
from farsight.services.commands.train import train
from farsight.services.console.chat import chat, run
from farsight.services.console.doctor import doctor
from farsight.services.console.processes import ps, stop
from farsight.services.console.serve import ENVIRONMENT, EXAMPLES, ignore_service_links, serve
from farsight.services.console.status import status
from farsight.services.demo.command import demo
from farsight.services.launch.failures import failing_in_lines
from farsight.services.one_line_errors import OneLineErrors, failing_in_one_line
from farsight.services.server_address import HostOption, PortOption, UrlOption, address_of

if TYPE_CHECKING:
    from farsight.services.commands.scaling import ServerChange

FIRST_STEPS = """Examples:

farsight chat smollm2   (a chat in this terminal)

farsight serve smollm2   (the same model over HTTP)

farsight doctor   (what this machine can do)

farsight compare --presets fcfs,farsight --trace zipf   (schedulers without a GPU)

farsight COMMAND -h   (what a command takes)"""

CHAT_EXAMPLES = """Examples:

farsight chat smollm2 --system "Answer in one sentence."

farsight run smollm2 "Why is the sky blue?" --max-tokens 60

cat question.txt | farsight run ./model.gguf --json

farsight chat --url http://127.0.0.1:8000"""

_USE, _SERVERS, _STUDY = "Use a model", "Running servers", "Schedulers, forecasts and measurements"

ModelOption = typer.Option(
    help="Name that `farsight models` lists, directory, GGUF file or hub id; default: the embedded model."
)

app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=FIRST_STEPS,
)


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
    ignore_service_links()


app.command(rich_help_panel=_USE, epilog=EXAMPLES, context_settings={"auto_envvar_prefix": ENVIRONMENT})(serve)
app.command(rich_help_panel=_USE, epilog=CHAT_EXAMPLES)(chat)
app.command(rich_help_panel=_USE, epilog=CHAT_EXAMPLES)(run)
app.command(rich_help_panel=_USE)(models)
app.command(rich_help_panel=_USE)(pull)
app.command(rich_help_panel=_USE)(doctor)
app.command(rich_help_panel=_SERVERS)(ps)
app.command(rich_help_panel=_SERVERS)(status)
app.command(rich_help_panel=_SERVERS)(stop)

TokenOption = Annotated[str | None, typer.Option(help="Admin token; default: FARSIGHT_ADMIN_TOKEN, or the run file's.")]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(envvar=KEY_VARIABLE, help="API key with the role admin, where no admin token is known."),
]


@app.command(rich_help_panel=_SERVERS)
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


@app.command(rich_help_panel=_SERVERS)
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


@app.command(rich_help_panel=_SERVERS)
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


@app.command(rich_help_panel=_SERVERS)
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


@app.command(rich_help_panel=_USE)
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


app.command(rich_help_panel=_SERVERS)(explain)
app.command(rich_help_panel=_SERVERS)(front)
app.add_typer(keys, name="keys", rich_help_panel=_SERVERS)
app.add_typer(cache, name="cache", rich_help_panel=_SERVERS)
for study in (simulate, compare, replay, advise, demo, bench, profile, train, evaluate):
    app.command(rich_help_panel=_STUDY)(study)

if __name__ == "__main__":
    app()
