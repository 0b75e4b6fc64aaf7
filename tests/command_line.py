"""Runs commands in this process: typer's runner, which would make all commands again for each of its calls (0.1 s)."""

from __future__ import annotations

import functools

import typer.testing
from typer.testing import CliRunner, Result

__all__ = ["CliRunner", "Result"]

assert hasattr(typer.testing, "_get_command")  # else the line below would do nothing
typer.testing._get_command = functools.cache(typer.main.get_command)
