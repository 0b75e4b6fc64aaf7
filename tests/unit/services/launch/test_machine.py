"""What a start asks of the machine: a free port, and GPUs where they are to compute."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from actors.runtime.hosts import num_gpus
from core.config.actors import ActorsConfig
from core.config.engine import EngineConfig
from core.config.load import FarsightConfig
from core.config.model import ModelConfig
from core.errors import ConfigError
from services.launch import machine
from services.launch.launch import LocatedModel, find_site
from services.launch.machine import check_gpus, check_own_gpus, check_port, visible_gpus


def test_each_replica_has_a_gpu() -> None:
    config = FarsightConfig(model=ModelConfig(replicas=2), engine=EngineConfig(device="cuda"))
    check_gpus(config, {"CPU": 8.0, "GPU": 2.0})
    with pytest.raises(ConfigError, match=r"engine\.device: got 'cuda', expected cpu, or a cluster with 2 GPUs, not 1"):
        check_gpus(config, {"GPU": 1.0})
    check_gpus(FarsightConfig(), {})
    site = find_site(config, LocatedModel(Path("/model"), "tiny"))
    assert [num_gpus(host, site) for host in ("worker-0", "control", "scheduler-0")] == [1, 0, 0]
    assert num_gpus("worker-0", find_site(FarsightConfig(), LocatedModel(Path("/model"), "tiny"))) == 0


def test_each_rank_of_a_replica_has_what_is_set_aside_for_it() -> None:
    model = ModelConfig(replicas=2, tensor_parallel=2, pipeline_parallel=2)
    on_gpus = FarsightConfig(model=model, engine=EngineConfig(device="cuda"))
    check_gpus(on_gpus, {"GPU": 8.0})
    with pytest.raises(ConfigError, match=r"engine\.device.*a cluster with 8 GPUs, not 7"):
        check_gpus(on_gpus, {"GPU": 7.0})
    check_gpus(FarsightConfig(model=model), {})
    halves = FarsightConfig(model=model, actors=ActorsConfig(gpus_per_rank=0.5))
    check_gpus(halves, {"GPU": 4.0})
    with pytest.raises(ConfigError, match=r"actors\.gpus_per_rank: got 0\.5, expected 4 GPUs in the cluster, not 3"):
        check_gpus(halves, {"GPU": 3.0})


def test_a_machine_without_gpus_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = FarsightConfig(engine=EngineConfig(device="cuda"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.9.0+cpu")
    with pytest.raises(ConfigError, match=r"got 'cuda', expected cpu \(torch 2\.9\.0\+cpu was built without CUDA\)"):
        check_own_gpus(config)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.9.0+cu128")
    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    with pytest.raises(ConfigError, match=r"got 'cuda', expected cpu, or a machine with 1 GPU, not 0"):
        check_own_gpus(config)
    check_own_gpus(FarsightConfig())
    monkeypatch.setattr(machine, "visible_gpus", lambda: 1)
    check_own_gpus(config)


def test_without_the_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert visible_gpus() == 0


def test_an_address_that_cannot_be_had_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"server\.port: .*end that program, or choose another port with --port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"server\.host: got '192\.0\.2\.1', expected an address of this machine"):
        check_port("192.0.2.1", port)  # an address for documentation, which no machine has
