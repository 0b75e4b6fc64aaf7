"""A server whose weights are rounded to 8 bits answers right, on the compiled step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai

from lab.embedded_model.tasks import TASKS, held_out_examples
from services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import one_ingress, start_server
from tests.e2e.test_embedded_model import ask


def test_weights_of_8_bits_over_http(tmp_path: Path) -> None:
    """Two held-out inputs of each task at once; with these weights all of 2,200 are answered right."""
    server = start_server(tmp_path / "log", "--weights", "int8", *one_ingress(tmp_path))
    try:
        examples = [example for task in TASKS for example in held_out_examples(task, 2, seed=7)]
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
        with client, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda example: ask(client, EMBEDDED_NAME, example), examples))
        assert answers == [example.answer for example in examples]
        assert "steps are computed by torch operations" not in server.log.read_text()
    finally:
        server.stop()
