"""Composition root: the Supervisor, which starts every other component, and the ingress replicas.

All of it runs in a private Ray cluster that this process starts and ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from farsight.actors.calls.message import Asked
from farsight.actors.calls.supervisor import SupervisorCalls
from farsight.actors.runtime.log_lines import send_log_lines
from farsight.actors.runtime.names import RUN_DIR_VARIABLE, SUPERVISOR, host_of
from farsight.actors.runtime.peer import Site
from farsight.core.config.learning import PredictorConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.core.processors import numa_nodes, usable_processors
from farsight.estimator.profile_file import profile_label, resolve_device
from farsight.policies.compose import check_scheduler, predicts_requests
from farsight.services.api.access.access_control import API_KEY_VARIABLE
from farsight.services.launch.access import absolute_paths, check_access
from farsight.services.launch.backends import check_replicas, look_for_servers
from farsight.services.launch.cluster import ServiceFailed, private_cluster
from farsight.services.launch.failures import PROCESS, print_line, printed_log_lines
from farsight.services.launch.machine import check_gpus, check_own_gpus, check_port
from farsight.services.launch.proxy import ProxyStart, front_proxy, wait_routed
from farsight.services.launch.signals import StopSignal, drain
from farsight.services.launch.stages import Stages
from farsight.services.launch.starting import LOOK_S, Example, StartingComponents, welcome
from farsight.services.process_use import own_processes
from farsight.services.progress import status_line
from farsight.services.proxy.haproxy import HAProxyRunner, choose_proxy
from farsight.services.run_file import ADMIN_TOKEN_VARIABLE, published

EMBEDDED_MODEL = Path(__file__).parents[1] / "embedded_model"
EMBEDDED_NAME = "farsight-embedded"
VISION_MODEL = Path(__file__).parents[1] / "embedded_vision"
VISION_NAME = "farsight-embedded-vision"
VISION_PATH = "embedded-vision"
"""What ``--model`` says for the embedded model that sees; a directory of that name is ``./embedded-vision``."""
WATCH_INTERVAL_S = 0.5

R = TypeVar("R")

APP_NAME = "farsight"
"""Name of the Ray Serve application."""

_FAILED_APP = ("DEPLOY_FAILED", "UNHEALTHY", "DELETING")

INGRESS_SILENCES = 3.0
"""Ray Serve replaces an ingress replica after three health checks in a row without an answer, each with a timeout of
this factor times ``silence_s``. Ray Serve cannot tell a stopped process from a slow one, hence the long time."""

INGRESS_CHECK_S = 0.5
"""How often Ray Serve asks an ingress replica how it is; it learns of a death by that."""

DRAIN_INGRESS_S = 600.0
"""Seconds for an ingress replica that is being removed to finish its streams. Ctrl-C does not wait for it."""


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """The served model.

    Attributes:
        directory: Where it lies; a GGUF file lies by itself.
        name: What clients call it.
        chats: It has a chat template.
    """

    directory: Path
    name: str
    chats: bool = True


def find_model(config: FarsightConfig) -> LocatedModel:
    """The configured model, or the embedded one. Without replicas of our own engine its tokenizer is enough.

    Every header of its files is read, so that a damaged or unsupported model is refused before anything starts.

    Raises:
        InvalidValueError: The model does not exist, is not supported or cannot run as configured.
    """
    from farsight.engine.build import check_worker
    from farsight.engine.parallel.mesh import Mesh
    from farsight.engine.vocabulary import vocabulary_size
    from farsight.services.api.text.prompts import PromptEncoder
    from farsight.tokenization.gguf_file import held_header

    model = locate_model(config)
    _header = held_header(model.directory)
    # Refuse a model that cannot run before anything starts.
    if config.model.replicas:
        mesh = Mesh(config.model.tensor_parallel, config.model.pipeline_parallel, config.model.expert_parallel)
        check_worker(model.directory, config.engine, mesh)
    else:
        vocabulary_size(model.directory)
    return dataclasses.replace(model, chats=PromptEncoder(model.directory, config.model).chats)


def locate_model(config: FarsightConfig) -> LocatedModel:
    """Returns the configured model, or the embedded one; nothing of it is read.

    Raises:
        InvalidValueError: The model does not exist.
    """
    from farsight.engine.checkpoint.model_config import resolve_model_dir

    if config.model.path == VISION_PATH:
        return LocatedModel(VISION_MODEL, config.model.name or VISION_NAME)
    if not config.model.path:
        return LocatedModel(EMBEDDED_MODEL, config.model.name or EMBEDDED_NAME)
    directory = resolve_model_dir(config.model.path, weights=config.model.replicas > 0)
    return LocatedModel(directory, config.model.name or _name_of(config.model.path))


def _absolute(path: str) -> str:
    """For processes with other working directories; empty stays empty."""
    return path and str(Path(path).absolute())


def _name_of(path: str) -> str:
    """The name that clients use unless another is configured: the directory's, or the file's without ``.gguf``."""
    name = Path(path).resolve().name
    return name[: -len(".gguf")] if name.lower().endswith(".gguf") else name


def find_site(config: FarsightConfig, model: LocatedModel) -> Site:
    """The configured service, with all open settings filled in.

    Raises:
        ConfigError: The predictor cannot be loaded, or external servers cannot be replicas under these settings.
    """
    check_replicas(config)
    is_file = config.log.path and not config.log.on_redis
    log = dataclasses.replace(config.log, path=str(Path(config.log.path).absolute())) if is_file else config.log
    named = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, name=model.name, chat_template=_absolute(config.model.chat_template)),
        engine=dataclasses.replace(config.engine, device=resolve_device(config.engine.device)),
        log=log,
        predictor=_find_predictor(config.predictor, config.scheduler.preset),
        access=absolute_paths(config.access),
    )
    return Site(named, str(model.directory), resolve_placement(config), sees=_sees(config, model.directory))


def _sees(config: FarsightConfig, directory: Path) -> bool:
    """Whether replicas of our own engine read pictures."""
    from farsight.engine.vision.geometry import load_geometry

    return bool(config.model.replicas) and load_geometry(directory) is not None


def _find_predictor(predictor: PredictorConfig, preset: str) -> PredictorConfig:
    """The predictor's configuration with absolute paths, after a check that its files can be read."""
    grows_forest = preset == "magnus" and predictor.from_traffic and not predictor.artefact
    predictor = dataclasses.replace(predictor, encoder=_find_encoder(predictor.encoder, by_default=grows_forest))
    if not predictor.artefact:
        return predictor
    from farsight.predictor.artefact import ArtefactError, load
    from farsight.predictor.models import check_artefact

    path = Path(predictor.artefact).absolute()
    try:
        check_artefact(load(path))
    except ArtefactError as error:
        raise ConfigError("predictor.artefact", predictor.artefact, f"what `farsight train` wrote ({error})") from error
    return dataclasses.replace(predictor, artefact=str(path))


def _find_encoder(name: str, *, by_default: bool) -> str:
    """The encoder's name, with an absolute path; a hub id is in the hub's cache afterwards.

    Args:
        by_default: Whether Magnus's own encoder is taken where none is named and its files are at hand.
    """
    from farsight.predictor.encoders import LABSE, NO_ENCODER

    if name == NO_ENCODER or not (name or by_default):
        return ""
    from farsight.engine.encoders.finding import has_labse
    from farsight.engine.encoders.loading import locate_encoder

    name = name or (LABSE if has_labse() else "")
    try:
        return locate_encoder(name) if name else ""
    except InvalidValueError as error:
        raise ConfigError("predictor.encoder", name, error.expected) from error


class Service:
    """The running components of one served model.

    Args:
        site: The service to run.
        starting: Its components.
        runner: Runs HAProxy; None where Ray Serve's own proxy is in front.
    """

    def __init__(self, site: Site, starting: StartingComponents, runner: HAProxyRunner | None = None) -> None:
        self._site = site
        self._starting = starting
        self._runner = runner
        self._ingress_replicas = site.config.server.ingress_replicas or default_ingress_replicas()
        self._supervisor_host: Any = None

    def start(self, stages: Stages) -> None:
        """Starts what takes requests; returns when the service answers them.

        Raises:
            StartTimedOut: the patience is over.
            FarsightError: A component cannot start; the message says why.
        """
        from ray.exceptions import RayError

        try:
            self._starting.wait(stages, self._start_proxy)
            self._await_ingress(stages)
        except RayError as error:
            raise ServiceFailed(f"a component of the service ended while it started: {error}") from error

    def _start_proxy(self) -> ProxyStart:
        """Begins to start the proxy, and the ingress, which waits for the model by itself."""
        config = self._site.config
        proxy = ProxyStart(config.server, config.access, choose_proxy(config.server))
        self._run_ingress()
        return proxy

    def _await_ingress(self, stages: Stages) -> None:
        from ray import serve

        with stages.stage("Ingress", lambda: f"processes to take requests (of {self._ingress_replicas})") as stage:
            if self._runner is not None:
                self._runner.follow()  # not before: two threads that import ray.serve at once break it
            while (app := serve.status().applications[APP_NAME]).status != "RUNNING":
                if app.status in _FAILED_APP:
                    raise ServiceFailed(f"the ingress cannot start: {app.message}")
                stages.check(stage)
                time.sleep(LOOK_S)
            wait_routed(stages, stage, self._runner)
            stage.outcome = f"{self._ingress_replicas} of {self._ingress_replicas} ready"

    def _run_ingress(self) -> None:
        """Begins to start the ingress replicas, or to change their number."""
        from ray import serve

        app = ingress_app(self._site, self._ingress_replicas, scalable=True)
        with contextlib.suppress(TimeoutError):  # The application is deployed; only the proxy answered late.
            serve.run_many([serve.RunTarget(app, name=APP_NAME, route_prefix="/")], wait_for_applications_running=False)

    def wait(self, stop: StopSignal) -> None:
        """Returns after a stop signal; until then it keeps the requested number of ingress replicas."""
        while not stop.received:
            time.sleep(WATCH_INTERVAL_S)
            wanted = self._wanted_ingress_replicas()
            if wanted not in (0, self._ingress_replicas) and not stop.received:
                self._ingress_replicas = wanted
                self._run_ingress()

    def drain(self, stop: StopSignal, say: Callable[[str], None]) -> None:
        """Refuses new requests, and gives open ones ``server.drain_s`` to end."""
        drain(
            lambda order: self._ask_supervisor(SupervisorCalls.drain_service, order),
            stop,
            self._site.config.server.drain_s,
            self._ingress_replicas,
            say,
        )

    def _wanted_ingress_replicas(self) -> int:
        """The requested number of ingress replicas; 0 if none was requested or the Supervisor does not answer."""
        counts = self._ask_supervisor(SupervisorCalls.counts)
        return 0 if counts is None else counts.ingress_replicas

    def _ask_supervisor(self, method: Callable[..., Coroutine[Any, Any, R]], request: Any = None) -> R | None:
        """The Supervisor's answer; None if it does not answer."""
        import ray
        from ray.exceptions import RayError

        from farsight.actors.runtime.hosts import find_host

        host = self._supervisor_host or find_host(host_of(SUPERVISOR, self._site.placement), self._site.namespace)
        self._supervisor_host = None  # until it has answered, it may be the handle of a dead one
        if host is None:
            return None
        try:
            asked = Asked(host, SUPERVISOR, method, request)
            answer = asked.read(ray.get(asked.ref, timeout=WATCH_INTERVAL_S))
        except RayError:
            return None
        self._supervisor_host = host
        return answer


def start_components(site: Site) -> StartingComponents:
    """Begins to start every component; waits for none.

    Raises:
        ConfigError: The cluster has too few GPUs, so that workers would wait for ever.
    """
    import ray

    from farsight.actors.runtime.hosts import create_host

    check_gpus(site.config, ray.cluster_resources())  # type: ignore[no-untyped-call]
    return StartingComponents(site, create_host(host_of(SUPERVISOR, site.placement), site, 0))


def ingress_app(site: Site, replicas: int, *, scalable: bool = False) -> Any:
    """The Ray Serve application.

    Args:
        site: The service.
        replicas: Number of ingress replicas.
        scalable: Whether this process adjusts their number to ``farsight scale ingress``.
    """
    from ray import serve

    from farsight.services.ingress.deployment import IngressDeployment

    deployment: Any = serve.deployment(serve.ingress()(IngressDeployment))
    deployment = deployment.options(
        name="Ingress",
        num_replicas=replicas,
        # The ingress itself counts and refuses requests (429); Serve's own bound must not apply first.
        max_ongoing_requests=2 * site.config.server.max_queued_requests,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=DRAIN_INGRESS_S,
        health_check_period_s=INGRESS_CHECK_S,
        health_check_timeout_s=INGRESS_SILENCES * site.config.actors.silence_s,
        # Without a fixed version, every run counts as an update, for which Serve replaces all replicas.
        version="1",
        _internal=True,
    )
    return deployment.bind(site, scalable)


def resolve_placement(config: FarsightConfig) -> str:
    """``auto`` is ``together`` or ``fused`` on a small machine, where processes compete for cores, else ``split``.

    It is ``packed`` if there are more emulated devices than cores, since emulated devices compute nothing.

    Raises:
        ConfigError: Models that compute would share a process.
    """
    placement, emulates = config.actors.placement, bool(config.engine.profile)
    if placement == "packed" and not emulates:
        raise ConfigError("actors.placement", placement, "together, fused or split, unless the devices are emulated")
    if placement != "auto":
        return placement
    if emulates and config.model.replicas > usable_processors():
        return "packed"
    if not _small_machine():
        return "split"
    return "fused" if predicts_requests(config) else "together"


def _small_machine() -> bool:
    return usable_processors() <= 4


def default_ingress_replicas() -> int:
    """Two, so that one may fail while the other takes the requests; one where processes compete for two cores."""
    return 1 if usable_processors() <= 2 else 2


def run_service(config: FarsightConfig, say: Callable[[str], None], stop: StopSignal) -> None:
    """Serves until a stop signal; every process it started has ended when it returns.

    Raises:
        FarsightError: The configuration cannot be served, or a vital component died.
    """
    status = status_line(sys.stdout) if config.server.log_format == "text" else None
    uses = own_processes if config.server.log_level == "debug" else None
    stages = Stages(say, config.server.start_patience_s, line=status, uses=uses)

    def print_log_line(line: str) -> None:
        with stages.above():
            print_line(line)

    check_scheduler(config.scheduler)  # Refuse a wrong preset name before anything starts.
    notes = check_access(config, os.environ)
    check_own_gpus(config)
    check_port(config.server.host, config.server.port)
    model = find_model(config)
    site = find_site(config, model)
    say(f"Farsight is starting: model {model.name}, preset {config.scheduler.preset}, placement {site.placement}.")
    for note in notes:
        say(note)
    look_for_servers(config, model.name, say)
    for note in filter(None, (learning_note(site.config), tiers_note(config))):
        say(note)
    if config.engine.profile:
        say(f"The device is emulated ({profile_label(config.engine.profile)}): answers are made up.")
    if advice := numa_advice(config, len(numa_nodes())):
        say(advice)
    proxy = choose_proxy(config.server)
    stages.say_use("Command")
    with (
        private_cluster(stop, stages=stages, proxy=proxy, server=config.server, access=site.config.access),
        printed_log_lines(Path(os.environ[RUN_DIR_VARIABLE]), print_log_line),
        # The components begin first: this process then imports what the proxy and the ingress need while they start.
        contextlib.nullcontext(start_components(site)) as starting,
        front_proxy(config.server, proxy, stop) as runner,
    ):
        send_log_lines(PROCESS, config.server.log_format, config.server.log_level)
        service = Service(site, starting, runner)
        service.start(stages)
        stop.running()
        url = f"{'https' if config.access.tls_cert else 'http'}://{config.server.host}:{config.server.port}"
        key = " -H 'Authorization: Bearer KEY'" if config.access.key_file or os.environ.get(API_KEY_VARIABLE) else ""
        say(f"Ready after {stages.elapsed_s:.1f} s{stages.summary}.")
        stages.say_use("Start")
        for line in welcome(url, model.name, fitting_example(config, model), key):
            say(line)
        with published(config.server.port, os.environ[ADMIN_TOKEN_VARIABLE], site.config.access.tls_cert) as run_file:
            stop.starting(lambda: run_file.unlink(missing_ok=True))
            service.wait(stop)
            if not stop.at_once:
                service.drain(stop, say)
        say("Stopping.")


def fitting_example(config: FarsightConfig, model: LocatedModel) -> Example:
    """Returns which request fits the served model."""
    from farsight.engine.checkpoint.encoder_config import load_encoder_config

    if not config.model.replicas and not config.model.path:
        return "chat"  # Other servers compute; the embedded model's tokenizer stands in for their model's.
    if model.directory == EMBEDDED_MODEL:
        return "embedded"
    if model.directory == VISION_MODEL and config.model.replicas:
        return "vision"
    encoder = load_encoder_config(model.directory) if config.model.replicas else None
    if encoder is not None:
        return "scores" if encoder.num_labels else "embeddings"
    return "chat" if model.chats else "text"


def learning_note(config: FarsightConfig) -> str:
    """Says that a policy reads forecasts of requests and nothing was trained for it; empty where that is not so."""
    predictor = config.predictor
    if predictor.artefact or not predicts_requests(config):
        return ""
    by = f"Magnus's features over {predictor.encoder}" if predictor.encoder else "application"
    return f"No --predictor: preset {config.scheduler.preset} learns output lengths from its own requests, by {by}."


def tiers_note(config: FarsightConfig) -> str:
    """Says who can tell from the disk what was said, or what keeping it there would bring; empty where it cannot be."""
    engine = config.engine
    if engine.disk_kv:
        return f"KV is kept in {engine.disk_kv}, up to {engine.disk_kv_bytes}: who reads it can tell what was said."
    serves = engine.device == "cpu" and engine.prefix_cache and config.model.replicas and config.model.num_ranks == 1
    text = "With --disk-kv DIR, later turns of a conversation read its KV from there, also after a restart."
    return text if serves and config.scheduler.execution == "ragged" else ""


def numa_advice(config: FarsightConfig, num_nodes: int) -> str | None:
    """What to set where replicas on the CPU cannot use all NUMA nodes of the machine; None if nothing."""
    if config.engine.device != "cpu" or config.engine.num_threads or not 0 < config.model.replicas < num_nodes:
        return None
    return (
        f"This machine has {num_nodes} NUMA nodes, and a replica takes no more threads than one node has processors. "
        f"Set model.replicas = {num_nodes}, not {config.model.replicas}, to use all."
    )
