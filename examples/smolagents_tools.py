"""A tool of smolagents.

pip install 'smolagents[openai]'
python examples/smolagents_tools.py http://127.0.0.1:8000/v1 farsight-embedded 'The weather in Rome?'
"""

from __future__ import annotations

import os
import sys

from smolagents import OpenAIModel, tool


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"It is sunny in {city}."


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    api_key = os.environ.get("FARSIGHT_API_KEY", "none")
    chat = OpenAIModel(model_id=model, api_base=base_url, api_key=api_key, max_tokens=300)
    message = chat.generate([{"role": "user", "content": text}], tools_to_call_from=[get_weather])
    for call in message.tool_calls or ():
        sys.stdout.write(f"{call.function.name}({call.function.arguments})\n")


if __name__ == "__main__":
    main()
