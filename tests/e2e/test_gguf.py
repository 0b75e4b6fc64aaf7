"""A GGUF file over HTTP: the embedded model in blocks of eight bits answers as it does from its directory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from lab.embedded_model.tasks import TASKS, held_out_examples
from services.launch.launch import EMBEDDED_MODEL
from tests.e2e.server import LONG_S, Server, farsight, one_ingress, start_server
from tests.e2e.test_embedded_model import ask
from tests.unit.engine.gguf_files import write_gguf

NUM_EXAMPLES = 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "embedded-q8.gguf", EMBEDDED_MODEL, "Q8_0")


@pytest.fixture(scope="module")
def served(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("log")
    running = start_server(folder / "server.log", "--model", str(file), *one_ingress(folder))
    yield running
    running.stop()
    assert running.process.returncode == 0


def test_a_file_answers_a_chat(served: Server) -> None:
    assert [each["id"] for each in served.get("/v1/models")["data"]] == ["embedded-q8"]
    examples = [example for task in TASKS for example in held_out_examples(task, NUM_EXAMPLES, seed=7)]
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0) as client:
        answers = [ask(client, "embedded-q8", example) for example in examples]
    right = sum(answer == example.answer for answer, example in zip(answers, examples, strict=True))
    assert right >= len(examples) - 2, [(e.text, a) for e, a in zip(examples, answers, strict=True) if e.answer != a]


def test_a_damaged_file_is_refused_by_the_command_itself(file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:-1000])
    done = subprocess.run(
        farsight("serve", "--model", str(damaged)), capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.returncode != 0
    assert "damaged.gguf" in done.stderr and "cut off" in done.stderr
    assert "Farsight is starting" not in done.stdout + done.stderr
