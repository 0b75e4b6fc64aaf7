"""The command-line reference: one section a command, from the commands themselves."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from farsight.services.cli import app


def cli_reference() -> str:
    """Every command with its arguments and options."""
    return "\n\n".join(_section(name, command) for name, command in _commands(typer.main.get_group(app)))


def _commands(group: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """All commands by name; those of a group follow each other under its name."""
    found: list[tuple[str, Any]] = []
    for name, command in sorted(group.commands.items()):
        inner = getattr(command, "commands", None)
        found += [(f"{prefix}{name}", command)] if inner is None else _commands(command, f"{prefix}{name} ")
    return found


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
