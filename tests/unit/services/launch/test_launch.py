"""What a server is started with."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import services
from actors.runtime.hosts import num_gpus
from actors.runtime.names import by_host, wanted_components
from core.config.actors import ActorsConfig
from core.config.engine import EngineConfig
from core.config.load import FarsightConfig
from core.config.log import LogConfig
from core.config.model import ModelConfig
from core.errors import ConfigError, InvalidValueError
from core.messages.status import ComponentCounts
from services.launch.launch import (
    EMBEDDED_MODEL,
    VISION_MODEL,
    LocatedModel,
    check_gpus,
    find_model,
    find_site,
    numa_advice,
    resolve_placement,
)
from services.launch.welcome import Example, welcome
from tests.unit.engine.gguf_files import write_gguf


@pytest.mark.parametrize(
    ("engine", "replicas", "num_nodes", "advised"),
    [
        (EngineConfig(), 1, 2, True),
        (EngineConfig(), 2, 4, True),
        (EngineConfig(), 1, 1, False),
        (EngineConfig(), 1, 0, False),  # the system does not tell
        (EngineConfig(), 2, 2, False),
        (EngineConfig(num_threads=3), 1, 2, False),
        (EngineConfig(device="cuda"), 1, 2, False),
        (EngineConfig(device="emulated:a100-7b"), 1, 2, False),
    ],
)
def test_one_replica_for_each_numa_node_is_advised(
    engine: EngineConfig, replicas: int, num_nodes: int, advised: bool
) -> None:
    advice = numa_advice(FarsightConfig(engine=engine, model=ModelConfig(replicas=replicas)), num_nodes)
    assert (advice is not None) == advised
    if advice is not None:
        assert f"Set model.replicas = {num_nodes}" in advice


@pytest.mark.parametrize("path", ["", "redis://user:secret@127.0.0.1:6379/2", "rediss://host", "/var/log.sqlite"])
def test_a_log_elsewhere_is_left_as_configured(path: str) -> None:
    site = find_site(FarsightConfig(log=LogConfig(path, 7, 3)), LocatedModel(Path("/model"), "tiny"))
    assert site.config.log == LogConfig(path, 7, 3)


def test_a_log_file_is_the_same_for_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    site = find_site(FarsightConfig(log=LogConfig("log.sqlite")), LocatedModel(Path("/model"), "tiny"))
    assert site.config.log.path == str(tmp_path / "log.sqlite")


@pytest.mark.parametrize(
    ("device", "replicas", "placement", "resolved"),
    [
        ("emulated:a100-7b", 10_000, "auto", "packed"),
        ("emulated:a100-7b", 10_000, "split", "split"),
        ("emulated:a100-7b", 1, "packed", "packed"),
        ("cpu", 10_000, "fused", "fused"),
    ],
)
def test_emulated_devices_share_processes_where_there_are_many(
    device: str, replicas: int, placement: str, resolved: str
) -> None:
    config = FarsightConfig(
        model=ModelConfig(replicas=replicas),
        engine=EngineConfig(device=device),
        actors=ActorsConfig(placement=placement),
    )
    assert resolve_placement(config) == resolved


def test_models_that_compute_do_not_share_a_process() -> None:
    with pytest.raises(ConfigError, match=r"actors\.placement"):
        resolve_placement(FarsightConfig(actors=ActorsConfig(placement="packed")))


def test_sixteen_workers_share_a_process() -> None:
    hosts = by_host(wanted_components(ComponentCounts(33, 1, 1, 0)), "packed")
    workers = {host: components for host, components in hosts.items() if host.startswith("workers-")}
    assert [len(components) for components in workers.values()] == [16, 16, 1]
    assert set(hosts) == {"control", "length-predictor-0", *workers}


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


def test_a_model_that_cannot_be_split_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"model\.tensor_parallel: got 3, expected a divisor"):
        find_model(FarsightConfig(model=ModelConfig(tensor_parallel=3)))
    with pytest.raises(ConfigError, match=r"model\.pipeline_parallel: got 9, expected at most the model's 4 layers"):
        find_model(FarsightConfig(model=ModelConfig(pipeline_parallel=9)))
    find_model(FarsightConfig(model=ModelConfig(tensor_parallel=4, pipeline_parallel=4)))


def _find(path: Path) -> LocatedModel:
    return find_model(FarsightConfig(model=ModelConfig(path=str(path))))


def test_a_damaged_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    assert _find(model) == LocatedModel(model, "model")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(InvalidValueError, match=r"model\.safetensors.*cut off"):
        _find(model)
    (model / "model.safetensors").write_bytes(weights)
    (model / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(ConfigError, match="chat template"):
        _find(model)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        _find(model)


def test_a_gguf_file_is_named_without_its_ending(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Tiny-Q8.gguf", EMBEDDED_MODEL)
    assert _find(path) == LocatedModel(path, "Tiny-Q8")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidValueError, match=r"Tiny-Q8\.gguf.*cut off"):
        _find(path)
    with pytest.raises(InvalidValueError, match="a GGUF file that exists"):
        _find(tmp_path / "missing.gguf")


def test_the_check_of_a_model_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from core.config.load import load_config; from services.launch.launch import find_model;"
        "find_model(load_config(None, {})); assert not {'torch', 'ray', 'gguf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(services.__file__).parents[1])


def test_the_first_request_that_is_shown_fits_the_model() -> None:
    def shown(example: Example) -> tuple[str, dict[str, Any]]:
        text = welcome("http://h:1", "own", example, " -H 'Authorization: Bearer KEY'")[0]
        assert "-H 'Authorization: Bearer KEY'" in text
        return text.split("curl -N http://h:1")[1].split(" ")[0], json.loads(text.split("-d '")[1].removesuffix("'"))

    path, body = shown("embedded")
    assert (path, body["model"], len(body["messages"])) == ("/v1/chat/completions", "own", 2)
    path, body = shown("vision")
    picture = body["messages"][0]["content"][0]["image_url"]["url"].removeprefix("data:image/png;base64,")
    assert path == "/v1/chat/completions"
    assert Image.open(io.BytesIO(base64.b64decode(picture))).size == (128, 128)
    path, body = shown("chat")
    assert (path, len(body["messages"])) == ("/v1/chat/completions", 1)
    path, body = shown("text")
    assert (path, body["stream"]) == ("/v1/completions", True)
    assert "messages" not in body


def test_the_embedded_model_that_sees_is_chosen_by_name() -> None:
    config = FarsightConfig(model=ModelConfig(path="embedded-vision"))
    assert find_model(config) == LocatedModel(VISION_MODEL, "farsight-embedded-vision")
    named = FarsightConfig(model=ModelConfig(path="embedded-vision", name="eyes"))
    assert find_model(named).name == "eyes"
