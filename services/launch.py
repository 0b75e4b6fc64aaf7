"""Composition root of ``placement = "fused"``: one control actor, the model workers, the ingress replicas.

Everything lives in a private Ray cluster that this process starts and takes down with itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.names import CONTROL, NAMESPACE, worker_name
from core.config import FarsightConfig
from core.errors import ConfigError, FarsightError
from policies.presets import build_router
from services.signals import StopSignal

EMBEDDED_MODEL = Path(__file__).parent / "embedded_model"
EMBEDDED_NAME = "farsight-embedded"
OBJECT_STORE_BYTES = 128 * 1024 * 1024
WATCH_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: where it lies and what clients call it."""

    directory: Path
    name: str


class ServiceFailed(FarsightError):
    """A part that everything depends on has died."""


def find_model(config: FarsightConfig) -> ServedModel:
    """The configured model, or the embedded one.

    Raises:
        InvalidValueError: it does not exist or is of an architecture that is not supported.
    """
    from engine.model_config import load_model_config, resolve_model_dir

    if not config.model.path:
        return ServedModel(EMBEDDED_MODEL, config.model.name or EMBEDDED_NAME)
    directory = resolve_model_dir(config.model.path)
    load_model_config(directory)  # an unsupported model is refused here, before anything starts
    return ServedModel(directory, config.model.name or Path(config.model.path).resolve().name)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nothing can listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError("server.port", f"{host}:{port}", f"a free address ({error.strerror})") from error


@contextlib.contextmanager
def private_cluster(stop: StopSignal) -> Iterator[None]:
    """A Ray cluster of our own with token auth, in a temporary directory that goes with it."""
    directory = Path(tempfile.mkdtemp(prefix="farsight-"))
    stop.starting(lambda: shutil.rmtree(directory, ignore_errors=True))
    _set_environment(directory)
    import ray

    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        stop.install()
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _set_environment(directory: Path) -> None:
    """Must run before Ray is imported; its daemons and workers inherit it."""
    token = directory / "auth_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # One event loop a replica: no thread hop a token. The ingress never blocks its loop.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
        "RAY_enable_metrics_collection": "0",
    }


class Service:
    """The running actors of one served model."""

    def __init__(self, config: FarsightConfig, model: ServedModel) -> None:
        self._config = config
        self._model = model
        self._vital: dict[Any, str] = {}

    def start(self) -> None:
        """Starts everything; returns when requests are answered."""
        import ray
        from ray import serve

        from actors.control import Control
        from actors.model_worker import ModelWorker

        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 1000}
        # Handles are Any: Ray adds methods at run time that no type describes.
        worker_class: Any = ray.remote(ModelWorker)
        control_class: Any = ray.remote(Control)
        workers = [
            worker_class.options(name=worker_name(index), **options).remote(
                f"worker-{index}", str(self._model.directory), self._config
            )
            for index in range(self._config.model.replicas)
        ]
        control = control_class.options(name=CONTROL, **options).remote(self._config)
        loading = [worker.start.remote() for worker in workers]
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its news are for its own developers
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": self._config.server.host, "port": self._config.server.port},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        for index, (worker, ready) in enumerate(zip(workers, loading, strict=True)):
            ray.get(control.connect.remote(str(index), worker, _started(ready)))
        self._vital = {worker.ended.remote(): "the model worker" for worker in workers}
        self._vital[control.ended.remote()] = "the scheduler"
        serve.run(self._ingress(), name="farsight", route_prefix="/")

    def _ingress(self) -> Any:
        from ray import serve

        from services.ingress import Ingress

        deployment: Any = serve.deployment(serve.ingress()(Ingress))
        deployment = deployment.options(
            name="Ingress",
            num_replicas=self._config.server.ingress_replicas or default_ingress_replicas(),
            # The ingress counts and refuses by itself (429); Serve's own bound must not come first.
            max_ongoing_requests=2 * self._config.server.max_queued_requests,
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=2,
        )
        return deployment.bind(str(self._model.directory), self._model.name, self._config)

    def wait(self, stop: StopSignal) -> None:
        """Returns once a signal to stop has come.

        Raises:
            ServiceFailed: a vital part died first.
        """
        import ray

        while not stop.received:
            done, _ = ray.wait(list(self._vital), num_returns=1, timeout=WATCH_INTERVAL_S)
            for ref in done:
                try:
                    ray.get(ref)
                except Exception as error:
                    raise ServiceFailed(f"{self._vital[ref]} died: {error}") from error
                raise ServiceFailed(f"{self._vital[ref]} ended")


def _started(loading: Any) -> Any:
    """What a worker says when it has started.

    Raises:
        FarsightError: it could not; the worker's own reason, without the way it took through the actor.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(loading)
    except RayTaskError as error:
        if isinstance(error.cause, FarsightError):
            raise error.cause from None
        raise ServiceFailed(f"the model worker could not start: {error.cause!r}") from error
    except RayError as error:
        raise ServiceFailed(f"the model worker died while it started: {error}") from error


def default_ingress_replicas() -> int:
    """One on a small machine, where processes compete for cores; else two, so that one may die."""
    return 1 if (os.cpu_count() or 1) <= 4 else 2


def run_service(config: FarsightConfig, say: Callable[[str], None], stop: StopSignal) -> None:
    """Serves until a signal to stop comes; everything it started is gone when it returns.

    Raises:
        FarsightError: the configuration cannot be served, or a vital part died.
    """
    began = time.monotonic()
    build_router(config.scheduler.preset, config.scheduler.placement)  # a wrong name is refused before anything starts
    model = find_model(config)
    check_port(config.server.host, config.server.port)
    say(f"Farsight is starting: model {model.name}, preset {config.scheduler.preset}.")
    with private_cluster(stop):
        service = Service(config, model)
        service.start()
        stop.running()
        url = f"http://{config.server.host}:{config.server.port}"
        say(f"Ready after {time.monotonic() - began:.1f} s. OpenAI API: {url}/v1   Stop: Ctrl-C")
        say(_example(url, model.name))
        service.wait(stop)
        say("Stopping.")


def _example(url: str, name: str) -> str:
    messages = '[{"role": "system", "content": "Write in upper case:"}, {"role": "user", "content": "hello world"}]'
    body = f'{{"model": "{name}", "messages": {messages}, "temperature": 0, "stream": true}}'
    return f"Try:\n  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'"
