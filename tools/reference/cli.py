"""The command-line reference: one section a command, from the commands themselves."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from services.cli import app


def cli_reference() -> str:
    """Every command with its arguments and options."""
    group = typer.main.get_group(app)
    return "\n\n".join(_section(name, command) for name, command in sorted(group.commands.items()))


def _section(name: str, command: Any) -> str:
    rows = ["| argument or option | default | meaning |", "|---|---|---|"]
    rows += [_row(parameter) for parameter in command.params if parameter.name != "help"]
    about = inspect.cleandoc(command.help or "").partition("\n\n")[0]
    return "\n".join([f"## `farsight {name}`", "", " ".join(about.split()), "", *rows])


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    words = (*parameter.opts, *parameter.secondary_opts) if is_option else (str(parameter.name).upper(),)
    names = ", ".join(f"`{word}`" for word in words)
    default = (
        "required" if parameter.required else "" if parameter.default in (None, (), "") else f"`{parameter.default}`"
    )
    about = " ".join(str(getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {names} | {default} | {about} |"
