"""Lines of a batch with pictures: each runs as a chat, and a wrong one fails alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.batches.conftest import Serve
from tests.unit.services.api.batches.test_batches import library, output, running, until
from tests.unit.services.api.test_pictures import FILE, PARTS, chat, image, seeing_backend, seeing_dir, text


@pytest.fixture
def encoder(tmp_path: Path) -> PromptEncoder:
    return PromptEncoder(seeing_dir(tmp_path, PARTS))


async def test_lines_with_pictures_run_as_chats(serve: Serve, encoder: PromptEncoder, tmp_path: Path) -> None:
    backend = seeing_backend(tmp_path)
    service = serve(backend=backend)
    bodies = [chat(text("see"), image()), chat(image(), image(b"other")), chat(text("no picture"))]
    bodies.append(chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}))
    data = b"".join(
        json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()
        + b"\n"
        for i, body in enumerate(bodies)
    )
    client = library(service)
    made = await client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = await client.batches.create(input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h")
    async with running(service.runner(backend=backend)):
        done = await until(service, batch.id, "completed")
    assert [line["custom_id"] for line in await output(service, done.output_file_id)] == ["c0", "c1", "c2"]
    (bad,) = await output(service, done.error_file_id)
    assert bad["custom_id"] == "c3" and bad["response"]["status_code"] == 400
    assert sorted(file.data for file, _ in backend.seen) == sorted([FILE, FILE, b"other"])
