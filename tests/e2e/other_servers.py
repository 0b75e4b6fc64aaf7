"""Servers of other projects that stand behind a replica: their start, and what one request gets from them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from farsight.core.request import PromptSource, Request, SamplingParams
from farsight.engine import Engine
from farsight.services.launch.launch import EMBEDDED_MODEL
from tests.unit.actors.external.test_backend import Replica

MESSAGES = [{"role": "system", "content": "Spell the digits:"}, {"role": "user", "content": "407"}]
ANSWER = "four zero seven"

Told = tuple[str, int, str]
"""Text, number of tokens, and how it ended."""


@contextlib.contextmanager
def other_server(command: Sequence[str], port: int, log: Path, start_s: float, env: Mapping[str, str]) -> Iterator[str]:
    """The address of a server that runs until the block ends.

    Args:
        start_s: Seconds until its ``/health`` has to answer.
        env: Variables beside those of this process.
    """
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **env}, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + start_s
        while not _answers(address):
            assert process.poll() is None, f"{command[0]} ended: {log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"{command[0]} is not there after {start_s} s"
            time.sleep(1.0)
        yield address
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False


async def answer(replica: Replica, name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Told:
    """What the replica's server answers."""
    request = Request(name, 0, "i", prompt, sampling)
    await replica.submit(request)
    deltas = await replica.end_of(request)
    assert deltas[-1].error is None
    text = "".join(each.text for each in deltas)
    return text, sum(each.num_unnamed for each in deltas), deltas[-1].finish_reason or ""


async def answer_to_chat(replica: Replica) -> str:
    """What the replica's server answers to ``MESSAGES`` where it takes text."""
    source = PromptSource(messages=tuple((each["role"], each["content"]) for each in MESSAGES))
    chat = Request("i-0", 0, "i", (5,), SamplingParams(30), source=source)
    await replica.submit(chat)
    return "".join(each.text for each in await replica.end_of(chat))


def own_answers(prompt: tuple[int, ...], samplings: list[SamplingParams]) -> list[Told]:
    """What our own engine answers, in float32."""
    own = Engine(EMBEDDED_MODEL, dtype="float32").generate([prompt] * len(samplings), samplings)
    return [(each.text, len(each.token_ids), each.finish_reason) for each in own]
