"""An agent that reads files and runs commands in one folder, by ``openai-agents``: ten turns of one session.

    python examples/agent_folder.py http://127.0.0.1:8000/v1 MODEL 'What is in these files?' [FOLDER]

Nothing outside the folder is read: a path that leads out of it is refused, and a command is one of ``COMMANDS``, run
without a shell, on files of the folder alone. The server shows the session on ``/dashboard/sessions``. It would find
it by its prompts as well; ``x-session-id`` gives it a name.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Annotated, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    RunHooks,
    Runner,
    Tool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import Field

NUM_TURNS = 10
MAX_SHOWN = 600
"""Characters of a file or of an output that the model gets to see."""

COMMANDS = {
    "list": ["ls", "-l"],
    "count": ["wc"],
    "first_lines": ["head", "-n", "3"],
    "last_lines": ["tail", "-n", "3"],
}
Command = Literal["list", "count", "first_lines", "last_lines"]
FileName = Annotated[str, Field(max_length=40)]
"""A bound of its own: a small model may write a name without end, and its turn ends in the middle of the call."""


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in the folder; raises ValueError for one that leads out of it or is none."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        raise ValueError(f"{name!r} is no file of this folder, which has {', '.join(sorted(os.listdir(folder)))}")
    return path


def tools_of(folder: Path) -> list[Tool]:
    """Returns the tools; what they refuse, the model is told."""

    @function_tool
    def read_file(name: FileName) -> str:
        """Returns the beginning of a file of the folder."""
        return inside(folder, name).read_text("utf-8", "replace")[:MAX_SHOWN]

    @function_tool
    def run_command(command: Command, name: FileName) -> str:
        """Runs a command on a file of the folder; list needs no file."""
        files = [] if command == "list" else [inside(folder, name).name]
        words = [*COMMANDS[command], "--", *files]
        done = subprocess.run(words, cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, timeout=10)
        return (done.stdout or done.stderr).decode("utf-8", "replace")[:MAX_SHOWN]

    return [read_file, run_command]


class AnswerAtLast(RunHooks[None]):
    """Calls tools in all turns but the last one, so that a small model works as long as a large one."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def on_tool_end(
        self, context: RunContextWrapper[None], agent: Agent[None], tool: Tool, result: object
    ) -> None:
        self.num_calls += 1
        sys.stdout.write(f"{self.num_calls}. {tool.name}: {str(result).splitlines()[:1]}\n")
        if self.num_calls >= NUM_TURNS - 1:
            agent.model_settings.tool_choice = "none"


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    set_tracing_disabled(True)  # traces would go to OpenAI
    if len(sys.argv) > 4:
        asyncio.run(look(base_url, model, text, Path(sys.argv[4]).resolve()))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        (folder / "notes.txt").write_text("The train to Rome leaves at nine.\nPlatform four.\n", "utf-8")
        (folder / "weather.csv").write_text("city,degrees\nRome,21\nOslo,4\n", "utf-8")
        asyncio.run(look(base_url, model, text, folder))


async def look(base_url: str, model: str, text: str, folder: Path) -> None:
    """Has the agent look at the folder, and prints what it did."""
    headers = {"x-session-id": f"folder-{uuid.uuid4().hex[:8]}", "x-farsight-application": "agent_folder"}
    key = os.environ.get("FARSIGHT_API_KEY", "none")
    client = AsyncOpenAI(base_url=base_url, api_key=key, default_headers=headers, timeout=600.0)
    agent = Agent[None](
        name="folder",
        instructions=f"You look at the files {', '.join(sorted(os.listdir(folder)))} with your tools.",
        model=OpenAIChatCompletionsModel(model, client),
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0.7, top_p=0.9, max_tokens=160
        ),
        tools=tools_of(folder),
        reset_tool_choice=False,
    )
    result = await Runner.run(agent, text, max_turns=NUM_TURNS + 2, hooks=AnswerAtLast())
    sys.stdout.write(f"{result.final_output}\n{len(result.raw_responses)} turns, session {headers['x-session-id']}\n")


if __name__ == "__main__":
    main()
