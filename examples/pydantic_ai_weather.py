"""An agent whose output is an object, by the ``pydantic-ai`` package.

pip install 'pydantic-ai-slim[openai]'
python examples/pydantic_ai_weather.py http://127.0.0.1:8000/v1 farsight-embedded 'The weather in Rome?'
"""

from __future__ import annotations

import os
import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=14)


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    provider = OpenAIProvider(base_url=base_url, api_key=os.environ.get("FARSIGHT_API_KEY", "none"))
    agent = Agent(OpenAIChatModel(model, provider=provider), output_type=Weather)
    sys.stdout.write(f"{agent.run_sync(text).output!r}\n")


if __name__ == "__main__":
    main()
