"""``farsight explain``: the decisions about one request, as a timeline."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farsight.core.errors import ConfigError
from farsight.services.commands.ask import ApiKeyOption, JsonOption, ask, key_for
from farsight.services.commands.simulate import (
    ConfigOption,
    KvTokensOption,
    MaxNumSeqsOption,
    ProfileOption,
    ReplicasOption,
    check_counts,
)
from farsight.services.one_line_errors import failing_in_one_line
from farsight.services.progress import wide_console
from farsight.services.server_address import HostOption, PortOption, UrlOption, address_of
from farsight.services.words import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


SHARE = 0.1
"""Times that differ by less are called about the same."""


@dataclass(frozen=True, slots=True)
class Question:
    """A counterfactual, and how the service was run.

    Attributes:
        change: As ``simulator.counterfactual.parse_change`` reads it.
        log: As for ``read_traffic``.
        config: TOML file of the server; None: its defaults.
        preset, replicas, max_num_seqs: As the request was served, where that is not as in ``config``.
        profile: Step times of a replica, a file of `farsight profile`; None for a 7B model on an A100.
    """

    change: str
    log: str
    config: Path | None
    preset: str | None
    replicas: int | None
    profile: Path | None
    kv_tokens: int | None
    max_num_seqs: int | None


def answer(question: Question, request_id: str) -> dict[str, Any]:
    """What would have been, of this request alone; seconds.

    Raises:
        FarsightError: The change, the log or the request is not as expected.
    """
    from farsight.services.commands.logged_traffic import read_traffic
    from farsight.services.commands.simulate import experiment_of, hardware
    from farsight.simulator.counterfactual import as_life, parse_change, what_if

    change = parse_change(question.change)
    latency, kv_tokens = hardware(None, None, None, question.profile)
    experiment = dataclasses.replace(
        experiment_of(question.config, question.replicas, question.max_num_seqs),
        latency=latency,
        kv_tokens=kv_tokens if question.kv_tokens is None else question.kv_tokens,
    )
    if question.preset is not None:
        experiment = experiment.under(question.preset)
    traffic = read_traffic(question.log)
    places = [place for place, each in enumerate(traffic.logged) if each.request.request_id == request_id]
    if not places:
        raise ConfigError("--log", question.log, f"a log that holds request {request_id} with an output")
    lives = [as_life(each.request) for each in traffic.logged]
    found = what_if(experiment, traffic.arrivals(), lives, places[0], change)
    return {"if": question.change, "logged_jct_s": lives[places[0]].jct_s, **dataclasses.asdict(found)}


def sentence(found: dict[str, Any]) -> str:
    """The answer in one sentence."""
    logged_s, jct_s = found["logged_jct_s"], found["jct_s"]
    ratio = jct_s / logged_s
    left_out = "" if found["is_whole"] else ", the nearest; others were left out to bound the work"
    word = "about the same" if abs(ratio - 1) < SHARE else f"{ratio:.2f} times that"
    return (
        f"With {found['if']} it would have taken {jct_s:.2f} s instead of {logged_s:.2f} s, {word} "
        f"(simulated: {found['changed']['jct_s']:.2f} s instead of {found['as_simulated']['jct_s']:.2f} s, "
        f"{counted(found['num_requests'], 'request')}{left_out})."
    )


TIMEOUT_S = 10.0
SIMULATED_TIMEOUT_S = 60.0
"""For an answer that the server simulates: more than the processor time that it may take."""


def explain(
    response_id: Annotated[str, typer.Argument(metavar="ID", help="The 'id' of an answer: chatcmpl-... or cmpl-...")],
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
    change: Annotated[
        str, typer.Option("--if", help="What would have been: preset=NAME, replicas=N or priority=N; the server says.")
    ] = "",
    log: Annotated[
        str, typer.Option(help="With --if: simulate here from this log, as in `log.path`, with the options below.")
    ] = "",
    preset: Annotated[
        str | None, typer.Option(help="With --log: the preset that served it (default: fcfs, or the server's).")
    ] = None,
    replicas: ReplicasOption = None,
    profile: ProfileOption = None,
    kv_tokens: KvTokensOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the decisions about a request, their times and the numbers behind them, or what would have been."""
    with failing_in_one_line():
        check_counts({"--replicas": replicas, "--kv-tokens": kv_tokens, "--max-num-seqs": max_num_seqs})
        address = address_of(url, host, port)
        found = _ask(address, response_id, api_key)
        if change and not log:
            for each in _what_if(address, found, change, api_key):
                typer.echo(json.dumps(each) if as_json else each["text"])
            return
        if change:
            question = Question(change, log, config, preset, replicas, profile, kv_tokens, max_num_seqs)
            answers = [answer(question, choice["request_id"]) for choice in found["choices"]]
            for each in answers:
                typer.echo(json.dumps(each) if as_json else sentence(each))
            return
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_explanation(found)


def _ask(url: str, response_id: str, api_key: str | None) -> dict[str, Any]:
    found: dict[str, Any] = ask(url, _path(response_id), TIMEOUT_S, key_for(url, api_key))
    return found


def _path(response_id: str) -> str:
    return f"/v1/requests/{urllib.parse.quote(response_id, safe='')}"


def _what_if(url: str, found: dict[str, Any], change: str, api_key: str | None) -> list[dict[str, Any]]:
    """What the server says of each choice of an answer."""
    from farsight.simulator.counterfactual import parse_change

    fields = {name: value for name, value in dataclasses.asdict(parse_change(change)).items() if value is not None}
    path, key = f"{_path(found['id'])}/what-if", key_for(url, api_key)
    queries = [urllib.parse.urlencode(fields | {"choice": choice["index"]}) for choice in found["choices"]]
    return [ask(url, f"{path}?{query}", SIMULATED_TIMEOUT_S, key) for query in queries]


def print_explanation(found: dict[str, Any]) -> None:
    """Prints an ``Explanation``, as JSON has it: a timeline for each choice."""
    console = wide_console(highlight=False)
    for choice in found["choices"]:
        if len(found["choices"]) > 1:
            console.print(f"[bold]choice {choice['index']}[/bold]")
        _print_choice(console, choice)


def _print_choice(console: Console, choice: dict[str, Any]) -> None:
    console.print(f"{_headline(choice)}")
    console.print(_timeline(choice["decisions"]))
    if choice["num_left_out"]:
        console.print(f"Dropped between these, as too many to keep: {counted(choice['num_left_out'], 'decision')}.")


def _headline(choice: dict[str, Any]) -> str:
    """The course of a request in one line."""
    summary = choice["summary"]
    parts = [f"request {choice['request_id']}: {choice['status']}"]
    if summary["replica"] is not None:
        parts.append(f"on replica {summary['replica']}")
    if summary["jct_s"] is not None:
        parts.append(f"took {_seconds(summary['jct_s'])}")
    if summary["ttft_s"] is not None:
        parts.append(f"first token after {_seconds(summary['ttft_s'])}")
    parts.append(f"waited {_seconds(summary['waited_s'])}")
    if summary["output_tokens"] is not None:
        predicted = summary["predicted_tokens"]
        parts.append(
            counted(summary["output_tokens"], "token") + ("" if predicted is None else f" ({predicted:.0f} predicted)")
        )
    parts += [
        counted(summary[name], noun)
        for name, noun in (("num_preemptions", "preemption"), ("num_resumptions", "resumption"))
        if summary[name]
    ]
    return ", ".join(parts)


def _timeline(decisions: list[dict[str, Any]]) -> Table:
    """A row per decision: its time, the time since the one before, the component, the sentence."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("after", justify="right", no_wrap=True, style="dim")
    table.add_column("by", no_wrap=True, style="cyan")
    table.add_column("decision")
    before_s = 0.0
    for each in decisions:
        who = each["by"] if not each["attempt"] else f"{each['by']} (attempt {each['attempt']})"
        table.add_row(_seconds(each["at_s"]), f"+{_seconds(each['at_s'] - before_s)}", who, each["text"])
        before_s = each["at_s"]
    return table


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if abs(value) >= 1 else f"{1000 * value:.1f} ms"
