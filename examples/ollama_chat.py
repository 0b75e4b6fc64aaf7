"""A streamed chat, JSON of a schema, and embeddings, by the ``ollama`` package; its address ends before ``/v1``.

pip install ollama
python examples/ollama_chat.py http://127.0.0.1:8000/v1 farsight-embedded 'the weather in rome'
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ollama import Client

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    headers = {"Authorization": f"Bearer {os.environ.get('FARSIGHT_API_KEY', 'none')}"}
    client = Client(host=base_url.removesuffix("/v1"), headers=headers)
    messages = [{"role": "system", "content": "Write in upper case:"}, {"role": "user", "content": text}]
    for line in client.chat(model, messages, stream=True, options={"temperature": 0}):
        sys.stdout.write(line.message.content or "")
    sys.stdout.write("\n")
    answer = client.generate(model, text, format=SCHEMA, options={"num_predict": 60})
    sys.stdout.write(f"{json.loads(answer.response)}\n")
    vectors = client.embed(model, [text, "a dog"]).embeddings
    sys.stdout.write(f"{len(vectors)} embeddings of {len(vectors[0])} numbers\n")


if __name__ == "__main__":
    main()
