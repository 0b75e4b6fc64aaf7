"""An object instead of text, by the ``instructor`` package.

pip install instructor
python examples/instructor_weather.py http://127.0.0.1:8000/v1 farsight-embedded 'The weather in Rome?'
"""

from __future__ import annotations

import os
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=14)


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    openai = OpenAI(base_url=base_url, api_key=os.environ.get("FARSIGHT_API_KEY", "none"))
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    found = client.chat.completions.create(
        model=model, response_model=Weather, max_tokens=300, messages=[{"role": "user", "content": text}]
    )
    sys.stdout.write(f"{found!r}\n")


if __name__ == "__main__":
    main()
