"""``farsight ps`` and ``farsight stop``: the servers that this user runs on this machine."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import psutil
import typer

from farsight.core.errors import ConfigError, FarsightError
from farsight.services.commands.ask import JsonOption, ask, key_for
from farsight.services.commands.down import end_service
from farsight.services.console.status import age, print_table
from farsight.services.one_line_errors import failing_in_one_line
from farsight.services.run_file import RunFile, run_files
from farsight.services.server_address import server_url

ANSWER_S = 2.0
"""A server that does not answer within this time is busy, or not up yet."""

CLOCK_S = 1.0
"""Start times of processes are as exact as this."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server of this user here.

    Attributes:
        models: Names that clients may ask for; empty while it does not answer.
        up_s: Seconds since its process began.
        memory_bytes: What its processes have in memory, pages that they share counted for each of them.
    """

    port: int
    pid: int
    url: str
    models: tuple[str, ...]
    up_s: float
    memory_bytes: int


def server_process(found: RunFile) -> psutil.Process | None:
    """Returns the process that wrote a run file; None if it has ended, whatever has its number now."""
    try:
        process = psutil.Process(found.pid)
        return process if process.create_time() <= found.written_at + CLOCK_S else None
    except psutil.Error:
        return None


def running_servers() -> list[RunningServer]:
    """Returns the servers of this user that run here, by port."""
    found = [(each, server_process(each)) for each in run_files()]
    return [_looked_at(each, process) for each, process in found if process is not None]


def _looked_at(found: RunFile, process: psutil.Process) -> RunningServer:
    url = server_url("127.0.0.1", found.port)
    try:
        listed = ask(url, "/v1/models", ANSWER_S, key_for(url, None))["data"]
    except FarsightError:  # it listens on another address, or does not answer now: its process is here all the same
        listed = []
    memory = 0
    for each in (process, *process.children(recursive=True)):
        try:
            memory += each.memory_info().rss
        except psutil.Error:
            continue  # it has just ended
    names = tuple(str(each["id"]) for each in listed)
    return RunningServer(found.port, found.pid, url, names, time.time() - process.create_time(), memory)


def ps(as_json: JsonOption = False) -> None:
    """List the servers that you run on this machine."""
    with failing_in_one_line():
        servers = running_servers()
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in servers]))
    elif not servers:
        typer.echo("No server of yours runs here: `farsight serve` starts one.")
    else:
        rows = []
        for each in servers:
            memory = f"{each.memory_bytes >> 20:,}"
            rows.append((each.port, ", ".join(each.models) or "-", age(each.up_s), memory, each.pid, each.url))
        print_table(("port", "model", "up", "memory, MiB", "pid", "address"), rows)


def stop(
    wanted: Annotated[
        int | None,
        typer.Argument(metavar="PORT", min=1, max=65535, help="Its port; needed where several servers run."),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Give open requests no time to end.")] = False,
    wait_s: Annotated[float, typer.Option(min=0, help="Most seconds to wait for its end.")] = 120.0,
    address: Annotated[
        str | None, typer.Option(help="End `serve deploy` in this Ray cluster instead: HOST:PORT, or auto.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """End a server: the one that you run here, or all of Farsight in a Ray cluster, as `farsight down` does."""
    with failing_in_one_line():
        files = [each for each in run_files() if server_process(each) is not None]
        if address is not None or (wanted is None and not files):
            ended = end_service(address or "auto", lambda line: typer.echo(line, err=as_json))
        else:
            ended = [end_server(chosen(files, wanted), now=now, wait_s=wait_s)]
    typer.echo(json.dumps({"ended": ended}) if as_json else f"Ended: {', '.join(ended) or 'nothing'}.")


def chosen(files: list[RunFile], port: int | None) -> RunFile:
    """Returns the server of this port, or the only one.

    Raises:
        ConfigError: There is none, or there are several.
    """
    fitting = [each for each in files if port in (None, each.port)]
    if len(fitting) != 1:
        ports = ", ".join(str(each.port) for each in files) or "none runs"
        raise ConfigError("PORT", port, f"the port of a server that you run here ({ports})")
    return fitting[0]


def end_server(found: RunFile, *, now: bool, wait_s: float) -> str:
    """Ends a server and returns its name, ``serve:PORT``.

    Raises:
        FarsightError: It still runs after ``wait_s``.
    """
    process = server_process(found)
    if process is not None:
        process.send_signal(signal.SIGINT if now else signal.SIGTERM)
        try:
            process.wait(wait_s)
        except psutil.TimeoutExpired as error:
            more = "its open requests may take longer; --now ends them"
            raise FarsightError(f"process {found.pid} has not ended within {wait_s:g} s: {more}") from error
    return f"serve:{found.port}"
