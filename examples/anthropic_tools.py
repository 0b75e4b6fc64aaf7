"""A conversation with a tool, by the ``anthropic`` package; its base URL ends before ``/v1``.

pip install anthropic
python examples/anthropic_tools.py http://127.0.0.1:8000/v1 farsight-embedded 'The weather in Rome?'
"""

from __future__ import annotations

import os
import sys
from typing import Any

from anthropic import Anthropic

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    key = os.environ.get("FARSIGHT_API_KEY", "none")
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=key)
    tools: list[Any] = [{"name": "get_weather", "input_schema": SCHEMA}]
    choice: Any = {"type": "tool", "name": "get_weather"}
    messages: list[Any] = [{"role": "user", "content": text}]
    answer = client.messages.create(model=model, max_tokens=300, messages=messages, tools=tools, tool_choice=choice)
    for block in answer.content:
        if block.type == "tool_use":
            sys.stdout.write(f"{block.name}({block.input})\n")


if __name__ == "__main__":
    main()
