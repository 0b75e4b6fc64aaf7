"""Wrong arguments of every command: one line with the flag, the value and what would be right; and ``--json``."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

from farsight.services.cli import app
from farsight.services.server_address import HostOption, PortOption, UrlOption
from tests.command_line import CliRunner

NO_RESULT = {("serve",), ("front",), ("chat",)}
"""Commands that run until they are ended; a demo can end by itself."""

MAY_BE_NEGATIVE = {("keys", "add", "--priority-min"), ("keys", "add", "--priority-max")}

Command = tuple[str, ...]


def walk(group: typer.Typer, path: Command = ()) -> Iterator[tuple[Command, Callable[..., Any]]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*path, command.name or command.callback.__name__), command.callback
    for each in group.registered_groups:
        assert each.typer_instance is not None
        yield from walk(each.typer_instance, (*path, str(each.name)))


COMMANDS = dict(walk(app))


HELP = typer.main.get_group(app).commands


@functools.cache
def flags_of(command: Command) -> dict[str, set[Any]]:
    """Each flag, or argument in capitals, with the types that its values may have."""
    found: dict[str, set[Any]] = {}
    for name, hint in typing.get_type_hints(COMMANDS[command], include_extras=True).items():
        if name in ("return", "context"):
            continue
        base, info = typing.get_args(hint)
        parts = {base, *typing.get_args(base)}
        parts |= {each for part in parts for each in typing.get_args(part)}
        if isinstance(info, typer.models.ArgumentInfo):
            found[info.metavar or name.upper()] = parts
        else:
            decls = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
            flag = next((each for each in decls if each.startswith("--")), None)
            found[flag or f"--{name.replace('_', '-')}"] = parts
    return found


NUMERIC = [
    (command, flag)
    for command in COMMANDS
    for flag, kinds in flags_of(command).items()
    if kinds & {int, float} and flag.startswith("--")
]


@pytest.fixture
def needed(tmp_path: Path) -> dict[Command, list[str]]:
    """What a command cannot do without, right but for servers and files that are not there."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"instruction": "a", "user_input": "b", "output_len": 3}\n')
    out, key_file = str(tmp_path / "out"), str(tmp_path / "keys.json")
    nobody = "http://127.0.0.1:1"
    return {
        ("scale",): ["replica", "1"],
        ("drain",): ["0"],
        ("run",): ["a-model", "a question"],
        ("batch",): [str(data), out],
        ("bench",): ["--url", nobody],
        ("explain",): ["cmpl-1"],
        ("front",): [nobody],
        ("profile",): ["--out", out],
        ("compare",): ["--presets", "fcfs"],
        ("replay",): [str(tmp_path / "none"), "--preset", "fcfs"],
        ("advise",): ["sharegpt-like"],
        ("train",): [str(data), "--out", out],
        ("evaluate",): [str(tmp_path), str(data)],
        ("keys", "add"): ["name", "--key-file", key_file],
        ("keys", "revoke"): ["name", "--key-file", key_file],
    }


def refusal(command: Command, args: list[str]) -> str:
    """The one line of a refusal."""
    done = CliRunner().invoke(app, [*command, *args])
    assert done.exit_code in (1, 2), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(("command", "flag"), NUMERIC, ids=[f"{'-'.join(each)}{flag}" for each, flag in NUMERIC])
def test_a_wrong_number_is_told_with_its_flag(
    command: Command, flag: str, needed: dict[Command, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("something has begun to run")

    monkeypatch.setattr("farsight.services.launch.launch.run_service", started)
    wrong = ["many", *([] if (*command, flag) in MAY_BE_NEGATIVE else ["-1"])]
    for value in wrong:
        line = refusal(command, [*needed.get(command, []), f"{flag}={value}"])
        assert line.startswith(f"farsight: {flag}: got "), line
        assert value in line and ", expected " in line, line


@pytest.mark.parametrize("command", COMMANDS, ids="-".join)
def test_every_command_with_a_result_has_json(command: Command) -> None:
    assert ("--json" in flags_of(command)) == (command not in NO_RESULT)


LISTENS = {("serve",), ("front",), ("demo",)}
"""Commands whose ``--port`` is their own."""

CLIENTS = [("status",), ("scale",), ("drain",), ("upgrade",), ("explain",), ("bench",), ("chat",), ("run",)]


def test_commands_that_ask_a_server_name_it_alike() -> None:
    naming: dict[str, Any] = {"port": PortOption, "host": HostOption, "url": UrlOption}
    for command, callback in COMMANDS.items():
        hints = typing.get_type_hints(callback, include_extras=True)
        given = {name: hints[name] for name in naming if name in hints and command not in LISTENS}
        if command == ("bench",):
            assert given.pop("url")  # several servers
        known = {name: kind for name, kind in naming.items() if (command, name) != (("bench",), "url")}
        assert given == (known if command in CLIENTS else {}), command


@pytest.mark.parametrize("flag", ["--url=http://127.0.0.1:1", "--port=1"])
@pytest.mark.parametrize("command", CLIENTS, ids="-".join)
def test_a_client_asks_the_server_that_it_is_told(
    command: Command, flag: str, needed: dict[Command, list[str]], tmp_path: Path
) -> None:
    args = [] if command == ("bench",) else needed.get(command, [])
    wanted = ["--model", str(tmp_path)] if command == ("upgrade",) else []
    assert "127.0.0.1:1" in refusal(command, [*args, *wanted, flag])


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["nothing"], ["'nothing'", "`farsight --help`"]),
        (["statu"], ["'status'"]),
        (["status", "--prot", "1"], ["--prot", "`farsight status --help`"]),
        (["keys", "ad"], ["'add'", "`farsight keys --help`"]),
        (["train"], ["DATA", "`farsight train --help`"]),
        (["status", "--port"], ["--port"]),
        (["serve", "--quantization", "awq"], ["--quantization", "a flag of vLLM", "--weights int8 or int4"]),
        (["serve", "--tensor-parallel-size", "0"], ["--tensor-parallel: got 0"]),
        (["serve", "--ssl-keyfile", "x"], ["access.tls_cert"]),
        (["run", "no/such/model", "x", "--local"], ["MODEL: got 'no/such/model'"]),
        (["run", "smollm2", " "], ["PROMPT", "a question"]),
        (["stop", "1"], ["PORT: got 1", "none runs"]),
        (["scale", "replica", "many"], ["COUNT", "'many'", "an integer"]),
        (["bench", "--url", "http://127.0.0.1:1", "--endpoint", "chats"], ["--endpoint", "'chats'", "'completions'"]),
    ],
)
def test_what_there_is_not(args: list[str], parts: list[str]) -> None:
    line = refusal((), args)
    assert all(part in line for part in parts), line


def test_without_arguments_there_is_help() -> None:
    done = CliRunner().invoke(app, [])
    assert "serve" in done.output and "Usage" in done.output
    assert "Examples:" in done.output and "Running servers" in done.output
    assert CliRunner().invoke(app, ["chat", "-h"]).output == CliRunner().invoke(app, ["chat", "--help"]).output


SERVE: list[Any] = list(HELP["serve"].params)


def test_every_flag_of_a_server_may_be_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [each for each in SERVE if each.param_type_name == "option" and each.name != "help"]
    for each in flags:
        monkeypatch.setenv(f"FARSIGHT_{each.name.upper()}", "true" if each.is_flag else "7")
    context = HELP["serve"].make_context("serve", [])
    assert len(flags) > 35
    for each in flags:
        found = context.params[each.name]
        source = context.get_parameter_source(each.name)
        assert source is not None and source.name == "ENVIRONMENT", each.name
        assert found is True if each.is_flag else str(found).strip("[']") in ("7", "7.0"), (each.name, found)


def test_a_service_of_kubernetes_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSIGHT_PORT", "tcp://10.0.0.1:8000")
    assert "none beside" in refusal((), ["serve", "a", "--model", "b"])
    monkeypatch.setenv("FARSIGHT_PORT", "many")
    assert "--port: got 'many'" in refusal((), ["serve"])


@pytest.mark.parametrize(("shell", "words"), [("bash", "farsight chat smol"), ("zsh", "farsight serve smol")])
def test_shells_complete_models(shell: str, words: str) -> None:
    variables = {"_FARSIGHT_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": "2"}
    variables["_TYPER_COMPLETE_ARGS"] = words
    done = CliRunner().invoke(app, [], env=variables, prog_name="farsight")
    assert "smollm2" in done.stdout


def test_bench_says_why_it_cannot_ask_a_server() -> None:
    line = refusal((), ["bench", "--url", "http://127.0.0.1:1"])
    assert "Connection refused" in line
    assert "Error(" not in line and "ConnectionKey" not in line


def test_keys_as_json(tmp_path: Path) -> None:
    file = ["--key-file", str(tmp_path / "keys.json")]
    made = json.loads(CliRunner().invoke(app, ["keys", "add", "one", *file, "--json"]).stdout)
    assert (made["name"], made["tenant"], made["roles"]) == ("one", "one", ["serve"])
    [listed] = json.loads(CliRunner().invoke(app, ["keys", "list", *file, "--json"]).stdout)
    assert listed["id"] == made["id"] and "key" not in listed
    assert json.loads(CliRunner().invoke(app, ["keys", "revoke", "one", *file, "--json"]).stdout) == {"revoked": "one"}


@pytest.mark.parametrize("name", HELP)
def test_nothing_of_the_help_is_taken_for_markup(name: str) -> None:
    """``[auto]`` would be a style, and not be shown."""
    command = HELP[name]
    texts = [command.help, *(getattr(param, "help", None) for param in command.params)]
    assert len([text for text in texts if text]) >= len(command.params)
    for text in filter(None, texts):
        assert Text.from_markup(text).plain == text


HEAVY = ["ray", "torch", "matplotlib"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [("farsight.services.cli", [*HEAVY, "farsight.simulator", "numpy"]), ("farsight.services.bench.compare", HEAVY)],
)
def test_the_command_line_stays_light(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print(set({absent}) & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_missing_gpu_ends_a_start_before_anything_of_a_server_is_imported() -> None:
    code = (
        "import sys; from farsight.services import cli\n"
        "from farsight.services.launch import machine; machine.visible_gpus = lambda: 0\n"
        "try: cli.app(['serve', '--device', 'cuda'])\n"
        "except SystemExit: pass\n"
        "heavy = {'farsight.simulator', 'numpy', 'matplotlib', 'ray', 'torch', 'farsight.policies.compose'}\n"
        "print(heavy & sys.modules.keys())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"
    assert "--device: got 'cuda', expected cpu" in ended.stderr
