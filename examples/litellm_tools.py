"""A forced call of a tool, by litellm.

pip install litellm mcp
python examples/litellm_tools.py http://127.0.0.1:8000/v1 farsight-embedded 'The weather in Rome?'
"""

from __future__ import annotations

import os
import sys
from typing import Any

import litellm

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    answer: Any = litellm.completion(
        model=f"openai/{model}",
        api_base=base_url,
        api_key=os.environ.get("FARSIGHT_API_KEY", "none"),
        messages=[{"role": "user", "content": text}],
        tools=[{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}],
        tool_choice="required",
        max_tokens=300,
        temperature=0,
    )
    for call in answer.choices[0].message.tool_calls:
        sys.stdout.write(f"{call.function.name}({call.function.arguments})\n")


if __name__ == "__main__":
    main()
