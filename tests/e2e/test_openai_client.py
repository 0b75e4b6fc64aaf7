"""The official ``openai`` client against a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.server import LONG_S


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=LONG_S) as client:
        yield client


def test_a_completion_counts_its_tokens(client: openai.OpenAI, model_name: str) -> None:
    answer = client.completions.create(
        model=model_name, prompt=[5, 6, 7], max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.choices[0].finish_reason == "length"


SAY_HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]


def counted(usage: openai.types.CompletionUsage | None) -> dict[str, object]:
    """The tokens of a usage: its GPU-seconds are those of one run."""
    assert usage is not None
    return usage.model_dump(exclude={"gpu_seconds"})


def test_streamed_completion_is_the_whole_one(client: openai.OpenAI, model_name: str) -> None:
    body: dict[str, Any] = {"model": model_name, "prompt": "The cat", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert counted(chunks[-1].usage) == counted(whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"n": 2, "seed": 3, "logprobs": True, "top_logprobs": 2}])
def test_streamed_chat_is_the_whole_one(client: openai.OpenAI, model_name: str, fields: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": model_name, "messages": SAY_HELLO, "max_completion_tokens": 12, **fields}
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True))
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert own[0].delta.role == choice.message.role == "assistant"
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
        assert (choice.logprobs is not None) == ("logprobs" in fields)
        if choice.logprobs is not None:
            tokens = [token.token for each in own if each.logprobs for token in each.logprobs.content or ()]
            assert tokens == [token.token for token in choice.logprobs.content or ()] != []


def test_errors_become_the_clients_exceptions(client: openai.OpenAI, model_name: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="no-such-model", prompt="The cat")
    assert missing.value.code == "model_not_found"
    assert model_name in str(missing.value)
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model_name, prompt="The cat", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(
            model=model_name, messages=[{"role": "user", "content": "x " * 5000}], stream=True
        )
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.param == "messages"


def test_embeddings(client: openai.OpenAI, model_name: str) -> None:
    """A model that generates also makes embeddings: the state of each text's last token."""
    answer = client.embeddings.create(model=model_name, input=["The cat", "A dog and", "The cat"])
    one, other, same = (row.embedding for row in answer.data)
    assert sum(each * each for each in one) == pytest.approx(1, rel=1e-4)
    assert one == pytest.approx(same, abs=1e-6)
    assert one != pytest.approx(other, abs=1e-2)
    assert answer.usage.prompt_tokens > 3


def test_a_batch(client: openai.OpenAI, model_name: str) -> None:
    body = {"model": model_name, "max_tokens": 4, "temperature": 0}
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": [5, 6 + i]}}
        for i in range(40)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    made = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    found = [json.loads(line) for line in client.files.content(str(batch.output_file_id)).text.splitlines()]
    assert [line["custom_id"] for line in found] == [f"c{i}" for i in range(40)]
    alone = client.completions.create(model=model_name, prompt=[5, 6], max_tokens=4, temperature=0)
    assert found[0]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    assert client.files.delete(made.id).deleted
