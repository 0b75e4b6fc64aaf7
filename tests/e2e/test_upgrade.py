"""The weights of a server change under load: no stream breaks, and none ends on weights that it did not begin with."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from farsight.core.config.engine import EngineConfig
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.services.launch.launch import EMBEDDED_MODEL, EMBEDDED_NAME
from tests.e2e.server import Server, farsight, one_ingress, start_server
from tests.e2e.test_scale import NUM_CLIENTS, TIMEOUT_S, body, eventually, read, rows

WEIGHTS = "model.safetensors"
KV_BYTES = 8 * 1024**2
"""The smaller pool that a replica gets while requests are served."""


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with other weights, of which it says other things."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / WEIGHTS)
    noisy = {name: each + 0.02 * torch.randn(each.shape, generator=generator) for name, each in tensors.items()}
    save_file({name: each.to(tensors[name].dtype) for name, each in noisy.items()}, folder / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("upgraded")
    # A predictor in a process of its own shows by its lives that it has started again.
    flags = ("--replicas", "2", "--dtype", "float32", "--threads", "1", "--placement", "fused")
    # Two ingress replicas send new requests to new weights some milliseconds apart.
    server = start_server(folder / "log", *flags, *one_ingress(folder))
    yield server
    server.stop()
    assert server.process.returncode == 0


def upgrade(server: Server, *flags: str) -> subprocess.CompletedProcess[str]:
    command = farsight("upgrade", "--port", str(server.port), *flags)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


async def texts(server: Server) -> list[str]:
    """What every client gets when it asks once."""
    async with session_of(server) as session:
        return await asyncio.gather(*(read(session, index) for index in range(NUM_CLIENTS)))


def session_of(server: Server) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(server.base_url, connector=connector, timeout=aiohttp.ClientTimeout(TIMEOUT_S))


async def ask_until(server: Server, over: asyncio.Event, index: int) -> list[str]:
    """The texts that a client gets, one after the other; ``read`` fails where one breaks or is not whole."""
    found = []
    async with session_of(server) as session:
        while not over.is_set():
            found.append(await read(session, index))
    return found


@asynccontextmanager
async def under_load(server: Server) -> AsyncIterator[None]:
    """Every answer inside is whole, by the weights from before or from after, and none by the old after the new."""
    old = await texts(server)
    over = asyncio.Event()
    clients = [asyncio.create_task(ask_until(server, over, index)) for index in range(NUM_CLIENTS)]
    try:
        yield
    finally:
        over.set()
        got = await asyncio.gather(*clients)
    new = await texts(server)
    assert all(one != other for one, other in zip(old, new, strict=True)), "the models say the same"
    for index, answers in enumerate(got):
        assert set(answers) <= {old[index], new[index]}
        switched = answers.index(new[index]) if new[index] in answers else len(answers)
        assert old[index] not in answers[switched:], "after an answer by the new weights came one by the old"


async def any_is_refused(server: Server) -> bool:
    """Whether one of four requests that come together is."""

    async def status(session: aiohttp.ClientSession, index: int) -> int:
        async with session.post("/v1/completions", json=body(index)) as reply:
            await reply.read()
            return reply.status

    async with session_of(server) as session:
        return 429 in await asyncio.gather(*(status(session, index) for index in range(4)))


def workers(server: Server) -> dict[str, str]:
    """The states of the workers by name."""
    return {row["name"]: row["state"] for row in rows(server, "replica")}


def lives(server: Server, name: str) -> int:
    """How often a component's process has started again; -1 where the component is not ready."""
    found = {row["name"]: row for row in server.get("/status")["actors"]}
    return int(found[name]["restarts"]) if found[name]["state"] == "ready" else -1


ALL_READY = {"worker-0": "ready", "worker-1": "ready"}


@pytest.mark.timeout(10 * TIMEOUT_S)
async def test_weights_change_under_load(upgraded: Server, other_model: Path) -> None:
    for model, flags in ((other_model, ()), (EMBEDDED_MODEL, ("--no-surge",))):
        async with under_load(upgraded):
            result = await asyncio.to_thread(upgrade, upgraded, "--model", str(model), *flags)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(f"all replicas run {model} (version "), result.stdout
        await eventually(lambda: workers(upgraded) == ALL_READY)


@pytest.mark.timeout(10 * TIMEOUT_S)
async def test_an_upgrade_goes_on_after_the_death_of_the_supervisor(upgraded: Server, other_model: Path) -> None:
    async with under_load(upgraded):
        running = asyncio.create_task(asyncio.to_thread(upgrade, upgraded, "--model", str(other_model)))
        await eventually(lambda: workers(upgraded).get("worker-2") == "ready")
        os.kill(await asyncio.to_thread(upgraded.pid_of, "Supervisor"), signal.SIGKILL)
        await running
        await eventually(lambda: workers(upgraded) == ALL_READY)


@pytest.mark.timeout(10 * TIMEOUT_S)
async def test_settings_change_under_load_and_no_answer_does(upgraded: Server, tmp_path: Path) -> None:
    """Each worker starts again with the new pool; every stream meanwhile is whole and what it was before."""

    def kv_blocks() -> int:
        return int(upgraded.get("/status")["kv"]["num_blocks"])

    block_bytes = load_model_config(EMBEDDED_MODEL).kv_bytes_per_token(torch.float32) * EngineConfig().kv_block_size
    small = 2 * (KV_BYTES // block_bytes)
    await eventually(lambda: kv_blocks() > small)  # a supervisor that has just started may have one report of two
    expected = await texts(upgraded)
    lives_before = {name: await asyncio.to_thread(lives, upgraded, name) for name in ("router", "length-predictor-0")}
    config = tmp_path / "new.toml"
    others = (
        "[scheduler]\ngamma = 0.5\n[server]\nmax_wait_s = 200\n[placement]\nwindow_s = 60\n[predictor]\nlearn = false\n"
    )
    config.write_text(f'[model]\ndtype = "float32"\n[engine]\nkv_memory = "{KV_BYTES}"\n{others}')
    over = asyncio.Event()
    clients = [asyncio.create_task(ask_until(upgraded, over, index)) for index in range(NUM_CLIENTS)]
    result = await asyncio.to_thread(upgrade, upgraded, "--config", str(config))
    over.set()
    got = await asyncio.gather(*clients)
    assert result.returncode == 0, result.stderr
    await eventually(lambda: workers(upgraded) == ALL_READY)
    await eventually(lambda: kv_blocks() == small)
    await eventually(lambda: lives(upgraded, "router") == lives_before["router"])
    await eventually(lambda: lives(upgraded, "length-predictor-0") == lives_before["length-predictor-0"] + 1)
    assert [set(answers) <= {text} for answers, text in zip(got, expected, strict=True)] == [True] * NUM_CLIENTS
    config.write_text("[server]\nmax_queued_requests = 1\n")
    assert (await asyncio.to_thread(upgrade, upgraded, "--config", str(config))).returncode == 0
    await eventually(lambda: asyncio.run(any_is_refused(upgraded)))
    config.write_text("[server]\nmax_queued_requests = 2048\n")
    assert (await asyncio.to_thread(upgrade, upgraded, "--config", str(config))).returncode == 0
    await eventually(lambda: not asyncio.run(any_is_refused(upgraded)))
    config.write_text(f"[server]\nport = {upgraded.port + 1}\n")
    refused = await asyncio.to_thread(upgrade, upgraded, "--config", str(config))
    assert (refused.returncode, "server.port" in refused.stderr) == (1, True), refused


async def test_a_model_that_cannot_take_the_place_changes_nothing(upgraded: Server, tmp_path: Path) -> None:
    before = await texts(upgraded)
    broken = tmp_path / "broken"
    shutil.copytree(EMBEDDED_MODEL, broken)
    (broken / WEIGHTS).write_bytes((broken / WEIGHTS).read_bytes()[:1000])
    stranger = tmp_path / "stranger"
    shutil.copytree(EMBEDDED_MODEL, stranger)
    (stranger / "tokenizer.json").write_text("{}")
    for model, words in [
        (tmp_path / "nowhere", "the absolute path of a model directory"),
        (stranger, "tokenizer.json differs"),
        (broken, WEIGHTS),
    ]:
        result = await asyncio.to_thread(upgrade, upgraded, "--model", str(model))
        assert (result.returncode, words in result.stderr) == (1, True), result
    assert await texts(upgraded) == before
    assert upgraded.get("/v1/models")["data"][0]["id"] == EMBEDDED_NAME
