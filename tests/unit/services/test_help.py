"""What ``farsight COMMAND --help`` says."""

from __future__ import annotations

import pytest
import typer
from rich.text import Text

from services.cli import app

COMMANDS = typer.main.get_group(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_of_it_is_taken_for_markup(name: str) -> None:
    """``[auto]`` would be a style, and not be shown."""
    command = COMMANDS[name]
    texts = [command.help, *(getattr(param, "help", None) for param in command.params)]
    assert len([text for text in texts if text]) >= len(command.params)
    for text in filter(None, texts):
        assert Text.from_markup(text).plain == text
