"""One run of a workload through live components, open loop: requests come at given times, whatever has ended."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.live_presets.local_service import Service, running
from farsight.core.config.load import FarsightConfig, load_config
from farsight.core.request import SamplingParams
from farsight.estimator.profile_file import DeviceProfile
from farsight.services.api.generation import PromptText
from farsight.services.api.requests import unnamed_request
from farsight.services.launch.launch import EMBEDDED_MODEL
from farsight.simulator.cluster.records import Record, Recorder
from farsight.simulator.traffic.workload import SimRequest

LATEST_S = 600.0
"""After the last arrival: a run that takes longer has got stuck."""

LAG_EVERY_S = 0.01

_GAP = "farsight:step_gap_seconds"

_TOKEN = 5
"""Token of prompts that share no prefix: only their length matters."""

_TOKENS = range(5, 256)
"""Tokens of the blocks of prompts that may be shared."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Equal replicas.

    Attributes:
        kv_tokens: KV tokens that the device holds.
        host_tokens: KV tokens that the host holds.
    """

    profile: DeviceProfile
    kv_tokens: int
    host_tokens: int
    max_num_seqs: int
    max_batch_tokens: int
    block_size: int = 16
    num_replicas: int = 1


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Results of a run, in seconds of the profile, whatever the speed.

    Attributes:
        num_preemptions: How often a sequence lost its place: its KV was offloaded or dropped.
        gap_s: Mean time between two steps, in seconds of this machine.
        lag_s: Mean time by which a timer rang late, in seconds of this machine: above some milliseconds other work had
            the processors, and the figures are of a machine that was not there.
    """

    records: list[Record]
    num_preemptions: int
    gap_s: float
    lag_s: float


def run_live(
    arrivals: Sequence[SimRequest],
    hardware: Hardware,
    settings: dict[str, dict[str, Any]],
    speed: float = 1.0,
    model: Path | None = None,
) -> LiveRun:
    """Serves the arrivals.

    Args:
        settings: Settings of the service, by table, beside those that follow from the hardware.
        speed: Divides every time of the profile and of the arrivals. What the service itself takes, and the periods
            of its messages and policies, remain: they weigh so many times more.
        model: Directory of one that computes, at its own pace, in place of the emulated device.

    Raises:
        ConfigError: a setting is not known, or not of this version.
    """
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps(_profile(hardware.profile, speed)))
        config = _config(f"emulated:{path}" if model is None else "cpu", arrivals, hardware, settings)
        return runner.run(_run(arrivals, config, speed, model or EMBEDDED_MODEL))


def _profile(profile: DeviceProfile, speed: float) -> dict[str, float]:
    """As a file of prices, so many times as fast."""
    prices = {name: value / speed for name, value in dataclasses.asdict(profile.cost).items()}
    return prices | {"kv_bytes": profile.kv_bytes, "copy_bandwidth": profile.copy_bandwidth * speed}


def _config(
    device: str, arrivals: Sequence[SimRequest], hardware: Hardware, settings: dict[str, dict[str, Any]]
) -> FarsightConfig:
    kv_bytes = hardware.profile.kv_bytes
    engine = {
        "device": device,
        "kv_memory": str(hardware.kv_tokens * kv_bytes),
        "host_kv_memory": str(hardware.host_tokens * kv_bytes),
        "block_size": hardware.block_size,
        "prefix_cache": any(each.prefix for each in arrivals),
        "max_num_seqs": hardware.max_num_seqs,
        "max_batch_tokens": hardware.max_batch_tokens,
        "max_model_len": max(each.prompt_len + each.max_new_tokens for each in arrivals),
        "benchmark_mode": True,
    }
    predicted = any(each.forecast is not None for each in arrivals)
    tables: dict[str, dict[str, Any]] = {
        "engine": engine,
        "model": {"replicas": hardware.num_replicas},
        "predictor": {"artefact": "given" if predicted else "", "wait_s": LATEST_S if predicted else 0.0},
    }
    return load_config(None, {name: tables.get(name, {}) | settings.get(name, {}) for name in {*tables, *settings}})


async def _run(arrivals: Sequence[SimRequest], config: FarsightConfig, speed: float, model_dir: Path) -> LiveRun:
    forecasts = {each.request_id: each.forecast for each in arrivals if each.forecast is not None}
    recorder = Recorder()
    prompts = [prompt_ids(each, config.engine.kv_block_size) for each in arrivals]
    async with running(config, forecasts, model_dir) as service:
        async with asyncio.timeout(arrivals[-1].arrived_at / speed + LATEST_S), asyncio.TaskGroup() as group:
            watches = [group.create_task(host.ended()) for host in service.hosts]  # raise what breaks a component
            await _ready(service)
            lags: list[float] = []
            watches.append(group.create_task(_watch_lag(lags)))
            began_at = asyncio.get_running_loop().time()
            each = zip(arrivals, prompts, strict=True)
            await asyncio.gather(*(_one(service, *request, recorder, began_at, speed) for request in each))
            for watch in watches:
                watch.cancel()
        preemptions = await service.metric("vllm:num_preemptions_total")
        gap_s = await service.metric(f"{_GAP}_sum") / max(1.0, await service.metric(f"{_GAP}_count"))
        return LiveRun(recorder.done, int(preemptions), gap_s, sum(lags) / max(1, len(lags)))


def prompt_ids(arrival: SimRequest, block_size: int) -> tuple[int, ...]:
    """Tokens that two prompts have in common as far as the names of their blocks are the same."""
    if not arrival.prefix:
        return (_TOKEN,) * arrival.prompt_len
    shared = [token for name in arrival.prefix for token in _block(name, block_size)]
    own = _drawn(zlib.crc32(arrival.request_id.encode()), arrival.prompt_len - len(shared))
    return (*shared, *own)


@lru_cache(maxsize=100_000)
def _block(name: int, block_size: int) -> tuple[int, ...]:
    return _drawn(name, block_size)


def _drawn(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(_TOKENS, k=num_tokens))


async def _watch_lag(lags: list[float]) -> None:
    """Until cancelled: by how much each ring of a timer is late."""
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lags.append(loop.time() - due_at)


async def _ready(service: Service) -> None:
    """A first request has gone through everything."""
    async with aclosing(service.client.stream(unnamed_request((_TOKEN,), SamplingParams(2)))) as deltas:
        async for _ in deltas:
            pass


async def _one(
    service: Service, arrival: SimRequest, prompt: tuple[int, ...], recorder: Recorder, began_at: float, speed: float
) -> None:
    """Books the life of a request as its client sees it."""
    loop = asyncio.get_running_loop()
    record = Record(arrival)
    sampling = SamplingParams(arrival.max_new_tokens, benchmark_len=arrival.output_len)
    text = None if arrival.forecast is None else PromptText("", arrival.request_id)
    await asyncio.sleep(began_at + arrival.arrived_at / speed - loop.time())
    stream = service.client.stream(unnamed_request(prompt, sampling), text)
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(f"{arrival.request_id}: {delta.error}")
            if delta.start == 0:
                record.cached_len += delta.cached_len
            if delta.token_ids:
                at = (loop.time() - began_at) * speed
                recorder.tokens(record, len(delta.token_ids), at, 0.0, at)
    record.finished_at = record.last_token_at
    assert record.num_tokens == arrival.output_len, "an output ends where it was told to"
    recorder.done.append(record)
