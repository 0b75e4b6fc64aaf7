"""A tool of LangChain.

pip install langchain-openai
python examples/langchain_tools.py http://127.0.0.1:8000/v1 farsight-embedded 'The weather in Rome?'
"""

from __future__ import annotations

import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    api_key = os.environ.get("FARSIGHT_API_KEY", "none")
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key, max_tokens=300)
    message = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(text)
    for call in message.tool_calls:
        sys.stdout.write(f"{call['name']}({call['args']}): {get_weather.invoke(call['args'])}\n")


if __name__ == "__main__":
    main()
