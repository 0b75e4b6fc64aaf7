"""The ``openai`` package with streams that go on although their connections break.

    python examples/resuming_openai.py http://127.0.0.1:8000/v1 farsight-embedded 'hello world'

Only the client is made in another way; everything that reads its streams stays as it is.
"""

from __future__ import annotations

import os
import sys

import httpx
from openai import OpenAI
from resuming import RESUME_S, ResumingTransport


def resuming_client(base_url: str, api_key: str = "none") -> OpenAI:
    """A client whose streams are resumable."""
    timeout = httpx.Timeout(30.0, read=RESUME_S)
    http_client = httpx.Client(transport=ResumingTransport(), timeout=timeout)
    return OpenAI(base_url=base_url, api_key=api_key, http_client=http_client)


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    max_tokens = int(sys.argv[4]) if len(sys.argv) > 4 else 64
    client = resuming_client(base_url, os.environ.get("FARSIGHT_API_KEY", "none"))
    chunks = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=max_tokens, stream=True
    )
    for chunk in chunks:
        for choice in chunk.choices:
            sys.stdout.write(choice.delta.content or "")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
