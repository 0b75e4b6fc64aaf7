"""Wrong arguments of the command line: one line with the flag, the value and what would be right."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from farsight.core.errors import FarsightError, InvalidValueError
from farsight.services.settings import VLLM_ANSWERS, naming

_UsageError: type[Any] = typer.BadParameter.__mro__[1]
"""The base of all errors of arguments, which typer does not name in public."""


class OneLineErrors(TyperGroup):
    """Commands whose wrong arguments are told in one line on stderr; exit status 2."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **fields: Any) -> Any:
        with _in_one_line():
            return super().make_context(info_name, args, *others, **fields)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line():
            return super().invoke(ctx)


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # no error: a group without arguments shows its help
            raise
        typer.echo(f"farsight: {told(error)}", err=True)
        raise typer.Exit(error.exit_code) from error


@contextmanager
def failing_in_one_line() -> Iterator[None]:
    """Ends the command with status 1 and one line on stderr where something fails that may."""
    try:
        yield
    except FarsightError as error:
        typer.echo(f"farsight: {error}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def failing_by_flag(flags: Mapping[str, str] | None = None) -> Iterator[None]:
    """Ends the command as ``failing_in_one_line``, also at errors of files and at Ctrl-C; the line names the flag.

    Args:
        flags: Flags of the fields that have another name than their flag.
    """
    try:
        yield
    except (FarsightError, OSError) as error:
        told_error: Exception = error
        if isinstance(error, InvalidValueError):
            named = error.field.isidentifier() and error.field.islower()
            flag = (flags or {}).get(error.field, f"--{error.field.replace('_', '-')}" if named else error.field)
            told_error = InvalidValueError(flag, error.value, error.expected)
        typer.echo(f"farsight: {told_error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def told(error: Any) -> str:
    """An error of arguments in the words of the project's own ones.

    Args:
        error: A usage error of typer.
    """
    param = getattr(error, "param", None)
    if param is None or type(error).__name__ == "MissingParameter":
        command = " ".join(["farsight", *_subcommands(error.ctx)])
        unknown = str(getattr(error, "option_name", ""))
        answer = VLLM_ANSWERS.get(unknown.removeprefix("--").replace("-", "_"))
        if answer is not None and command == "farsight serve":
            return f"{unknown}: a flag of vLLM, expected {answer}"
        return f"{error.format_message().rstrip('.')}; `{command} --help` tells what there is"
    flag = next((each for each in param.opts if each.startswith("--")), param.metavar or param.opts[0].upper())
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return f"{flag}: {error.message.rstrip('.')}"
    wrong = cause.errors()[0]
    return str(InvalidValueError(flag, wrong["input"], _expected(wrong)))


def _subcommands(context: Any) -> list[str]:
    """Names of the commands that a context is in, without the program's own."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return names


def _expected(wrong: Mapping[str, Any]) -> str:
    """What would be right, of one error of pydantic."""
    kind, bounds = wrong["type"], wrong.get("ctx", {})
    if kind in _KINDS:
        return _KINDS[kind]
    for name, sign in _BOUNDS.items():
        if name in bounds:
            return f"a number {sign} {bounds[name]}"
    return " ".join(str(wrong["msg"]).removeprefix("Value error, ").split())


_KINDS = {
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


naming_flags = functools.partial(naming, flags=True)
"""An error of a setting that a flag has set names the flag; takes settings by section and name, None for not given."""
