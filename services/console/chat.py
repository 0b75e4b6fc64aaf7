"""``farsight chat`` and ``farsight run``: ask a model, in this process or of a server that runs here."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farsight.core.config.load import FarsightConfig, load_config
from farsight.core.errors import ConfigError, FarsightError, InvalidValueError
from farsight.services.commands.ask import ApiKeyOption, JsonOption, key_for
from farsight.services.commands.explain import print_explanation
from farsight.services.commands.pull import fetch_missing
from farsight.services.console.screen import Shown, show_markdown, write_plain
from farsight.services.console.serve import model_names
from farsight.services.console.talk import ServerTalk, Talk
from farsight.services.one_line_errors import failing_in_one_line, naming_flags
from farsight.services.run_file import run_files
from farsight.services.server_address import HostOption, PortOption, UrlOption, address_of
from farsight.services.settings import overrides_of

if TYPE_CHECKING:
    from rich.console import Console

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Name that `farsight models` lists, directory, GGUF file or hub id; default: the server that runs here, "
        "or the embedded model.",
        autocompletion=model_names,
    ),
]
SystemOption = Annotated[str | None, typer.Option("--system", help="What the model is told before the first question.")]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of an answer; default: what the context takes.")
]
TemperatureOption = Annotated[
    float | None, typer.Option(min=0, max=2, help="0 always takes the likeliest token; default: 1.")
]
PresetOption = Annotated[str | None, typer.Option(help="In this process: the scheduling preset; default: fcfs.")]
WeightsOption = Annotated[str | None, typer.Option(help="In this process: full, float, int8 or int4.")]
ThreadsOption = Annotated[int | None, typer.Option(min=0, help="In this process: compute threads; 0: by the machine.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="In this process: a farsight.toml.")]
LocalOption = Annotated[bool, typer.Option("--local", help="Use no server, even where one runs here.")]

_LOOK_S = 0.2

HELP = """/explain   why the last answer took as long as it did
/new       forget the conversation
/system TEXT   what the model is told before the first question
/help      these lines
/quit      leave, as Ctrl-D does; Ctrl-C ends an answer"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whom to ask.

    Attributes:
        url: Address of a server that the user has named; None for whatever is here.
        settings: For a model in this process, by flag.
    """

    model: str | None
    url: str | None
    api_key: str | None
    local: bool
    config: Path | None
    settings: dict[str, Any]


def prepare(wanted: Wanted, say: Callable[[str], None]) -> str | FarsightConfig:
    """Returns the address of the named server, else of one here that serves this model, else settings for this process.

    A model of the catalogue is downloaded where this process needs it.

    Raises:
        FarsightError: A setting is wrong, or the model cannot be had.
    """
    url = wanted.url or (None if wanted.local else _server_here(wanted.model))
    if url is not None:
        return url
    with _naming_model(wanted):
        config = load_config(wanted.config, _overrides(wanted))
        fetch_missing(config.model.path, say)
        return config


def open_talk(wanted: Wanted, found: str | FarsightConfig) -> Talk:
    """Returns a conversation with what ``prepare`` has found.

    Raises:
        FarsightError: The server does not answer, or the model cannot be loaded.
    """
    if isinstance(found, str):
        talk = ServerTalk(found, key_for(found, wanted.api_key))
        talk.model = wanted.model or talk.model
        return talk
    with _naming_model(wanted):
        from farsight.services.console.local_talk import LocalTalk

        return LocalTalk(found)


def _overrides(wanted: Wanted) -> dict[str, dict[str, Any]]:
    return overrides_of({"model": wanted.model, **wanted.settings})


@contextmanager
def _naming_model(wanted: Wanted) -> Iterator[None]:
    """Names the flags in errors of settings, and the model as the argument that it is."""
    try:
        with naming_flags(_overrides(wanted)):
            yield
    except InvalidValueError as error:
        if error.field != "--model":
            raise
        raise InvalidValueError("MODEL", error.value, error.expected) from error


def _server_here(model: str | None) -> str | None:
    """Returns the address of a running server of this user that serves the model, or any if none is named."""
    if not run_files():
        return None
    from farsight.services.console.processes import running_servers

    fitting = (each.url for each in running_servers() if each.models and model in (None, *each.models))
    return next(fitting, None)


def _named_server(context: typer.Context, url: str | None, host: str, port: int) -> str | None:
    """Returns the address that the user has named; None if no flag names one."""
    sources = [context.get_parameter_source(name) for name in ("url", "host", "port")]
    given = any(source is not None and source.name == "COMMANDLINE" for source in sources)
    return address_of(url, host, port) if given else None


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _fields(max_tokens: int | None, temperature: float | None) -> dict[str, Any]:
    given = {"max_tokens": max_tokens, "temperature": temperature}
    return {name: value for name, value in given.items() if value is not None}


def run(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As for `farsight chat`.", autocompletion=model_names)],
    prompt: Annotated[str | None, typer.Argument(help="The question; default, or -: what standard input says.")] = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    preset: PresetOption = None,
    weights: WeightsOption = None,
    threads: ThreadsOption = None,
    config: ConfigOption = None,
    local: LocalOption = False,
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a model one question and print its answer."""
    with failing_in_one_line():
        settings = {"preset": preset, "weights": weights, "threads": threads}
        named = _named_server(context, url, host, port)
        question = sys.stdin.read() if prompt in (None, "-") else str(prompt)
        if not question.strip():
            raise ConfigError("PROMPT", question, "a question")
        wanted = Wanted(model, named, api_key, local, config, settings)
        talk = open_talk(wanted, prepare(wanted, _tell))
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        try:
            pieces = talk.say(messages, _fields(max_tokens, temperature))
            if as_json:
                typer.echo(json.dumps(_answer(pieces, talk)))
            elif sys.stdout.isatty():
                from rich.console import Console

                show_markdown(pieces, Console(highlight=False))
            else:
                write_plain(pieces, sys.stdout)
        finally:
            talk.close()


def _answer(pieces: Iterator[Any], talk: Talk) -> dict[str, Any]:
    """Returns a whole answer, with what is known of it."""
    shown, began = Shown(), time.monotonic()
    for piece in pieces:
        shown.add(piece, time.monotonic() - began)
    last = talk.last
    return {
        "id": last.response_id,
        "model": talk.model,
        "text": shown.text,
        "finish_reason": last.finish_reason,
        "tokens": last.num_tokens,
        "ttft_s": shown.ttft_s,
        "took_s": shown.took_s,
        "eta_s": shown.eta_s,
    }


def chat(
    context: typer.Context,
    model: ModelArgument = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    preset: PresetOption = None,
    weights: WeightsOption = None,
    threads: ThreadsOption = None,
    config: ConfigOption = None,
    local: LocalOption = False,
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Chat with a model in the terminal: with history, Markdown, predictions of the end, and /explain."""
    with failing_in_one_line():
        settings = {"preset": preset, "weights": weights, "threads": threads}
        named = _named_server(context, url, host, port)
        wanted = Wanted(model, named, api_key, local, config, settings)
        from rich.console import Console

        console = Console(highlight=False)
        with opening(wanted) as talk:
            Conversation(talk, console, _fields(max_tokens, temperature), system).run()


@contextmanager
def opening(wanted: Wanted) -> Iterator[Future[Talk]]:
    """Loads the model while the first question is typed; what has to be downloaded is here before that."""
    found = prepare(wanted, _tell)
    with ThreadPoolExecutor(1, "loading") as loader:
        talk = loader.submit(open_talk, wanted, found)
        try:
            yield talk
        finally:
            talk.result().close()


class Conversation:
    """Questions and answers until the user leaves.

    Args:
        fields: What every request has.
        system: What the model is told before the first question.
    """

    def __init__(self, talk: Future[Talk], console: Console, fields: dict[str, Any], system: str | None) -> None:
        self._talk = talk
        self._console = console
        self._fields = fields
        self._commands: dict[str, Callable[[str], None]] = {
            "/explain": self._explain,
            "/new": lambda _: self._begin(self._system),
            "/system": self._begin,
            "/help": lambda _: console.print(HELP, style="dim", markup=False),
        }
        self._begin(system or "")

    def _begin(self, system: str) -> None:
        self._system = system
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def run(self) -> None:
        """Reads questions and shows answers."""
        if sys.stdin.isatty():
            import readline  # noqa: F401, which gives ``input`` its editing and its history

            self._console.print("/help tells what there is; Ctrl-D leaves.", style="dim")
        while (line := self._read()) is not None:
            word, _, rest = line.partition(" ")
            if word in ("/quit", "/exit", "/bye"):
                return
            if word in self._commands:
                self._telling(functools.partial(self._commands[word], rest.strip()))
            elif line.startswith("/"):
                self._telling(lambda: self._commands["/help"](""))
            elif line:
                self._telling(functools.partial(self._ask, line))

    def _read(self) -> str | None:
        """Returns a line that the user types; None at the end."""
        try:
            return input(">>> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                self._console.print()
            return None

    def _telling(self, act: Callable[[], None]) -> None:
        """Does it; an error of a request ends no conversation, but one of the start does."""
        self._await_model()
        try:
            act()
        except FarsightError as error:
            self._console.print(f"farsight: {error}", style="red", markup=False)

    def _await_model(self) -> None:
        """Says, on a terminal, what the first question waits for."""
        if self._talk.done() or not self._console.is_terminal:
            self._talk.result()
            return
        from farsight.engine.native.library import is_compiling

        with self._console.status("Loading the model ...") as line:
            while not wait([self._talk], _LOOK_S).done:
                if is_compiling():
                    line.update("Compiling kernels for this processor, once: up to a minute ...")
        self._talk.result()

    def _ask(self, question: str) -> None:
        talk = self._talk.result()
        self._messages.append({"role": "user", "content": question})
        pieces = talk.say(self._messages, self._fields)
        try:
            if self._console.is_terminal:
                shown = show_markdown(pieces, self._console)
            else:
                shown = write_plain(pieces, sys.stdout)
        except FarsightError:
            self._messages.pop()
            raise
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()  # what the user has stopped reading is not computed any more
        self._messages.append({"role": "assistant", "content": shown.text})
        if self._console.is_terminal:
            self._console.print(f"{shown.facts(talk.last.num_tokens)} · /explain", style="dim", markup=False)

    def _explain(self, _: str) -> None:
        talk = self._talk.result()
        if not talk.last.response_id:
            raise FarsightError("nothing has been answered yet")
        print_explanation(talk.explain())
