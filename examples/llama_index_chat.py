"""A streamed chat, by LlamaIndex.

pip install llama-index-llms-openai-like
python examples/llama_index_chat.py http://127.0.0.1:8000/v1 farsight-embedded 'the weather in rome'
"""

from __future__ import annotations

import os
import sys

from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    base_url, model, text = sys.argv[1:4]
    api_key = os.environ.get("FARSIGHT_API_KEY", "none")
    llm = OpenAILike(model=model, api_base=base_url, api_key=api_key, is_chat_model=True, max_tokens=300, temperature=0)
    messages = [ChatMessage(role="system", content="Write in upper case:"), ChatMessage(role="user", content=text)]
    for chunk in llm.stream_chat(messages):
        sys.stdout.write(chunk.delta or "")
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
