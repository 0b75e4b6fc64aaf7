"""The files between a request and its first token are those that really ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.request_path import ROOT, trace_request

STATIONS = (
    "services/api/app.py",
    "services/ingress/engine_client.py",
    "actors/scheduling/router.py",
    "policies/fleet/request_table.py",
    "policies/replica/scheduler.py",
    "policies/order/fcfs.py",
    "actors/worker/model_worker.py",
    "kvcache/lease.py",
    "engine/worker.py",
    "engine/sampling/sampler.py",
    "actors/worker/token_channels.py",
)


@pytest.mark.torch
async def test_every_station_of_a_request_is_found(tmp_path: Path) -> None:
    files = await trace_request("fcfs", tmp_path)
    assert set(STATIONS) <= files.keys()
    assert all((ROOT / name).is_file() for name in files)
    assert files["policies/replica/scheduler.py"]["ReplicaScheduler.handle"] > 0
    assert "policies/order/gittins.py" not in files, "another preset's"
