"""A conversation with a tool, by the ``openai`` package.

    python examples/openai_tools.py http://127.0.0.1:8000/v1 farsight-embedded 'The weather in Rome?'

The call is forced, so that it works with every model; leave out ``tool_choice`` where the model knows tools.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openai import OpenAI

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    return f"sunny in {city.lower()}"


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    client = OpenAI(base_url=base_url, api_key=os.environ.get("FARSIGHT_API_KEY", "none"))
    messages: list[Any] = [{"role": "user", "content": text}]
    tools: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=tools,
        temperature=0,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        if call.type == "function":
            sys.stdout.write(f"{call.function.name}({call.function.arguments})\n")
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    final = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0)
    sys.stdout.write(f"{final.choices[0].message.content}\n")


if __name__ == "__main__":
    main()
