"""Configuration: frozen dataclasses, read from TOML, overridden by flags; a wrong key or value is named."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.config.replica import ReplicaConfig
from core.errors import ConfigError, InvalidValueError
from core.units import parse_memory

DTYPES = ("auto", "float32", "bfloat16", "float16")
PROXIES = ("auto", "serve", "haproxy")
HAPROXY_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")
BACKENDS = ("auto", "native", "torch", "xformers")
WEIGHTS = ("auto", "full", "int4")
EXECUTIONS = ("ragged", "static")
PLACEMENTS = ("auto", "fused", "split", "packed")
PREFIX_SHARING = ("all", "key")
EMULATED = "emulated:"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served.

    Attributes:
        path: A directory or a hub id; empty means the embedded model.
        name: The name clients ask for; empty means the directory's name.
        dtype: One of ``DTYPES``.
        replicas: Copies of the model on our own engine, each with a worker and a scheduler of its own. In a file with
            ``[[replica]]`` tables that does not say, there are none.
        tensor_parallel: Processes that each layer of a replica is split over; must divide its attention heads.
        pipeline_parallel: Stages of consecutive layers that a replica is cut into, each with ``tensor_parallel``
            processes; as many batches are under way at once.
        max_replicas: Up to so many, as the predicted queue delay asks for; 0: always ``replicas``. With it:
        min_replicas: Never fewer.
        target_queue_delay_s: A new request should not have to wait longer; while it would, there are more replicas.
        scale_down_after_s: One fewer, once a request would not have waited half of that for so long even so.
    """

    path: str = ""
    name: str = ""
    dtype: str = "auto"
    replicas: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    min_replicas: int = 1
    max_replicas: int = 0
    target_queue_delay_s: float = 1.0
    scale_down_after_s: float = 60.0

    def __post_init__(self) -> None:
        _require(self.replicas >= 0, "model.replicas", self.replicas, "an integer >= 0")
        for name in ("tensor_parallel", "pipeline_parallel", "min_replicas"):
            _require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "an integer >= 1")
        if self.max_replicas:
            low, high = max(self.replicas, self.min_replicas), self.max_replicas
            _require(high >= low, "model.max_replicas", high, f"0, or at least {low}")
            _require(self.replicas >= self.min_replicas, "model.min_replicas", self.min_replicas, f"<= {self.replicas}")
        for name in ("target_queue_delay_s", "scale_down_after_s"):
            _require(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "a number > 0")
        _require(self.dtype in DTYPES, "model.dtype", self.dtype, f"one of {', '.join(DTYPES)}")

    @property
    def most_replicas(self) -> int:
        """How many there may be without anybody asking for it: they share what one machine has."""
        return max(self.replicas, self.max_replicas)

    @property
    def num_ranks(self) -> int:
        """Processes that a replica computes in."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one worker runs.

    Attributes:
        device: What computes. ``cpu``, ``cuda`` (the first GPU that the process sees), or ``emulated:PROFILE``: nothing
            does; steps and copies take as long as the profile says (a name, or a file of ``farsight profile``), and the
            tokens are made up. To measure scheduling.
        kv_memory: Memory of the KV pool, as ``512MiB`` or ``2GiB``; ``auto`` takes what a full batch of
            full-length sequences needs, but all replicas together at most a fifth of the machine's free memory. On a
            GPU it takes at most what weights and the largest step leave of ``gpu_memory_utilization``. An
            emulated device counts it in the tokens of its profile, and takes at most what that says the device has. A
            replica of several processes has so much in each of them.
        host_kv_memory: Memory of the host pool that sequences can be offloaded to, as for ``kv_memory``; ``0`` is none.
            ``auto`` is as much as the KV pool has, but all replicas together at most a fifth of the machine's free
            memory, where the KV policy moves KV to the host, and none where it does not.
        block_size: Tokens in a KV block; 0 is 64 on a GPU, whose kernels take multiples of that, and 32 elsewhere.
        prefix_cache: Sequences that begin with the same tokens share the KV of their full blocks, also with
            sequences that have ended, as long as the memory is not needed.
        max_num_seqs: Sequences in one step.
        max_batch_tokens: Tokens computed in one step; longer prompts are prefilled in several.
        max_model_len: Tokens a sequence may reach, prompt and output together; 0 is the model's own context, which only
            an emulated device can go beyond.
        num_threads: Compute threads of a worker; 0 shares all cores but one, which serves HTTP and scheduling,
            among the replicas.
        benchmark_mode: Requests may say, with ``benchmark_len``, where their outputs end. Only to measure scheduling.
        backend: What computes a step: ``native`` is one compiled call on the CPU, ``xformers`` torch operations with
            xformers' attention on a GPU, ``torch`` the reference on either; ``auto`` takes one of the former where it
            can be had and the model is one that it knows.
        gpu_memory_utilization: Share of a GPU's memory that weights, KV pool and the largest step may take together.
        compile: Let torch compile what lies between two attentions. It takes minutes at the start.
        weights: ``int4`` rounds the matrices of the layers to 4 bits, in groups of 128 with a scale each: a quarter of
            the memory, slower steps. ``full`` leaves them as they are; ``auto`` is what the preset says.
    """

    device: str = "cpu"
    kv_memory: str = "auto"
    host_kv_memory: str = "auto"
    block_size: int = 0
    prefix_cache: bool = True
    max_num_seqs: int = 128
    max_batch_tokens: int = 1024
    max_model_len: int = 0
    num_threads: int = 0
    benchmark_mode: bool = False
    backend: str = "auto"
    gpu_memory_utilization: float = 0.9
    compile: bool = False
    weights: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batch_tokens"):
            value = getattr(self, name)
            _require(value >= 1, f"engine.{name}", value, "an integer >= 1")
        self.kv_bytes()
        self.host_kv_bytes()
        for name in ("block_size", "max_model_len", "num_threads"):
            value = getattr(self, name)
            _require(value >= 0, f"engine.{name}", value, "an integer >= 0")
        _require(self.backend in BACKENDS, "engine.backend", self.backend, f"one of {', '.join(BACKENDS)}")
        _require(self.weights in WEIGHTS, "engine.weights", self.weights, f"one of {', '.join(WEIGHTS)}")
        share = self.gpu_memory_utilization
        _require(0 < share <= 1, "engine.gpu_memory_utilization", share, "a number > 0 and <= 1")
        self._check_device()

    def _check_device(self) -> None:
        known = self.device in ("cpu", "cuda") or bool(self.profile)
        _require(known, "engine.device", self.device, f"cpu, cuda, or {EMULATED}PROFILE as in {EMULATED}a100-7b")
        if self.device == "cuda":
            _require(self.backend != "native", "engine.backend", self.backend, "auto, xformers or torch on a GPU")
        if self.backend == "xformers":
            _require(self.device == "cuda", "engine.device", self.device, "cuda, where xformers computes")
            size = self.kv_block_size
            _require(size % 64 == 0, "engine.block_size", size, "a multiple of 64, as xformers' kernels take it")

    @property
    def profile(self) -> str:
        """What an emulated device is emulated from; empty if the device is a real one."""
        return self.device.removeprefix(EMULATED) if self.device.startswith(EMULATED) else ""

    @property
    def kv_block_size(self) -> int:
        """``block_size``, or what it is on this device."""
        return self.block_size or (64 if self.device == "cuda" else 32)

    def kv_bytes(self) -> int | None:
        """``kv_memory`` in bytes; None for ``auto``."""
        return None if self.kv_memory == "auto" else _parse_memory("engine.kv_memory", self.kv_memory, "auto")

    def host_kv_bytes(self) -> int | None:
        """``host_kv_memory`` in bytes; 0 for none, None for ``auto``."""
        text = self.host_kv_memory
        if text in ("0", "auto"):
            return 0 if text == "0" else None
        return _parse_memory("engine.host_kv_memory", text, "auto, or 0 for none")


def _parse_memory(field: str, text: str, otherwise: str) -> int:
    try:
        return parse_memory(text)
    except InvalidValueError as error:
        raise ConfigError(field, error.value, f"{otherwise}, or {error.expected}") from error


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What decides.

    Attributes:
        preset: A named composition of policies (``policies.presets``).
        placement: How requests find their replica; empty means as the preset says. So it does for the other parts:
        order: Who runs next on a replica.
        admission: Who may become resident there.
        kv: What becomes of KV when memory is short: whose is dropped, or moved to the host pool.
        execution: How a formed batch runs, in the presets of batch mode: ``ragged`` without padding, each request
            returned when it ends; ``static`` padded to the longest, in lockstep, returned together.
        gamma: Ageing in the order of ``farsight``: 0.1 cuts the longest waits of an overload, for a longer mean.
        watermark: Share of the KV pool that admission may fill, in (0, 1].
        standby_slots: Requests shipped to the worker ahead of need.
        quantum_s: First quantum of skip-join MLFQ at the least; it is the time of a step of one sequence where that is
            longer. A quantum should outlast four round trips between scheduler and worker, of some 5 ms each.
        starve_limit_s: Under skip-join MLFQ a request that has waited so long is promoted to the first queue.
        event_log: Directory in which every Scheduler writes down all that its state machine hears and answers, to be
            told again to a fresh one (``python -m services.commands.conformance``); empty writes nothing.
    """

    preset: str = "fcfs"
    placement: str = ""
    order: str = ""
    admission: str = ""
    kv: str = ""
    execution: str = "ragged"
    gamma: float = 0.0
    watermark: float = 0.95
    standby_slots: int = 16
    quantum_s: float = 0.02
    starve_limit_s: float = 30.0
    event_log: str = ""

    def __post_init__(self) -> None:
        executions = ", ".join(EXECUTIONS)
        _require(self.execution in EXECUTIONS, "scheduler.execution", self.execution, f"one of {executions}")
        _require(self.gamma >= 0, "scheduler.gamma", self.gamma, "a number >= 0")
        _require(0 < self.watermark <= 1, "scheduler.watermark", self.watermark, "a number > 0 and <= 1")
        _require(self.standby_slots >= 0, "scheduler.standby_slots", self.standby_slots, "an integer >= 0")
        for name in ("quantum_s", "starve_limit_s"):
            _require(getattr(self, name) > 0, f"scheduler.{name}", getattr(self, name), "a number > 0")


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """What of E2 is used, where ``scheduler.placement`` or the preset's own is ``e2`` (Preble, section 4.2).

    Attributes:
        window_s: H, seconds over which load, sharing and queueing are counted.
        rebalance: Redirect requests from replicas that are too heavy ...
        rebalance_ratio: ... by so many times the load of the lightest.
        autoscale: Give prefixes whose queueing doubles on a replica too heavy to one more.
        balance: Send what is not cached to replicas that mostly decode.
    """

    window_s: float = 180.0
    rebalance: bool = True
    rebalance_ratio: float = 1.5
    autoscale: bool = True
    balance: bool = True

    def __post_init__(self) -> None:
        _require(self.window_s > 0, "placement.window_s", self.window_s, "a number > 0")
        _require(self.rebalance_ratio >= 1, "placement.rebalance_ratio", self.rebalance_ratio, "a number >= 1")


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How batches are formed under a preset of batch mode.

    Attributes:
        batch_size: Requests of a batch at most; 0 is the preset's own number. Never more than ``engine.max_num_seqs``.
        wma_threshold: A request joins a batch only if the wasted memory accesses stay below this; in tokens (Magnus).
        num_bins: Bins of output lengths (Multi-Bin).
        max_wait_s: A request waits so long for others of its bin; then its batch goes as it is (Multi-Bin).
    """

    batch_size: int = 0
    wma_threshold: float = 50_000.0
    num_bins: int = 4
    max_wait_s: float = 1.0

    def __post_init__(self) -> None:
        _require(self.batch_size >= 0, "batch.batch_size", self.batch_size, "an integer >= 0")
        _require(self.wma_threshold >= 0, "batch.wma_threshold", self.wma_threshold, "a number >= 0")
        _require(self.num_bins >= 1, "batch.num_bins", self.num_bins, "an integer >= 1")
        _require(self.max_wait_s >= 0, "batch.max_wait_s", self.max_wait_s, "a number >= 0")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side.

    Attributes:
        ingress_replicas: HTTP processes; 0 picks by the machine's size.
        max_body_bytes: Larger request bodies are refused.
        max_queued_requests: Requests in the house at once, per ingress replica; more are refused with 429.
        max_queued_tokens: The same, counted in prompt tokens.
        prefix_sharing: Whose requests share cached prefixes: ``all``, or only those of the same bearer ``key`` (those
            without one share with each other). ``cache_salt`` of a request divides further.
        proxy: ``serve`` is Ray Serve's own proxy. ``haproxy`` carries several times the requests; ``host`` must be
            the loopback interface or all of them, and the ingress replicas listen there too (ports 30000 to 32699).
            ``auto`` takes the latter where it can be had.
        first_token_deadline_s: Where there are ``[[replica]]`` tables, a request without a token after so long fails,
            wherever it has been by then; not while it is on our own engine.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    ingress_replicas: int = 0
    max_body_bytes: int = 4 * 1024 * 1024
    max_queued_requests: int = 2048
    max_queued_tokens: int = 2_000_000
    prefix_sharing: str = "all"
    proxy: str = "auto"
    first_token_deadline_s: float = 120.0

    def __post_init__(self) -> None:
        _require(1 <= self.port <= 65535, "server.port", self.port, "a port from 1 to 65535")
        sharing = self.prefix_sharing
        _require(sharing in PREFIX_SHARING, "server.prefix_sharing", sharing, f"one of {', '.join(PREFIX_SHARING)}")
        _require(self.proxy in PROXIES, "server.proxy", self.proxy, f"one of {', '.join(PROXIES)}")
        if self.proxy == "haproxy":
            _require(self.host in HAPROXY_HOSTS, "server.host", self.host, f"one of {', '.join(HAPROXY_HOSTS)}")
        _require(self.ingress_replicas >= 0, "server.ingress_replicas", self.ingress_replicas, "an integer >= 0")
        for name in ("max_body_bytes", "max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            _require(value >= 1, f"server.{name}", value, "an integer >= 1")
        deadline_s = self.first_token_deadline_s
        _require(deadline_s > 0, "server.first_token_deadline_s", deadline_s, "a number > 0")


@dataclass(frozen=True, slots=True)
class ActorsConfig:
    """Which pieces run in which processes.

    Attributes:
        placement: ``split`` gives every piece its own actor; ``fused`` puts Router, Schedulers, KV offload managers,
            estimator, log store and supervisor into one; ``packed`` is that, and sixteen workers of emulated devices
            share a process as well; ``auto`` picks by the machine's size, and by how many devices are emulated.
        length_predictors: How many ...
        max_length_predictors: ... and up to how many while questions queue before them; 0: never more.
        serving_time_estimators: How many.
        gpus_per_rank: GPUs that Ray sets aside for each process of a replica that is spread over several; negative: one
            where it computes on a GPU, else none.
        scheduler_delay_s: Holds back every message to and from a Scheduler for so long; to measure that no step
            waits for one.
    """

    placement: str = "auto"
    length_predictors: int = 1
    max_length_predictors: int = 0
    serving_time_estimators: int = 1
    gpus_per_rank: float = -1.0
    scheduler_delay_s: float = 0.0

    def __post_init__(self) -> None:
        _require(self.placement in PLACEMENTS, "actors.placement", self.placement, f"one of {', '.join(PLACEMENTS)}")
        for name in ("length_predictors", "serving_time_estimators"):
            value = getattr(self, name)
            _require(value >= 1, f"actors.{name}", value, "an integer >= 1")
        most = self.max_length_predictors
        ok = most == 0 or most >= self.length_predictors
        _require(ok, "actors.max_length_predictors", most, f"0, or at least {self.length_predictors}")
        _require(self.scheduler_delay_s >= 0, "actors.scheduler_delay_s", self.scheduler_delay_s, "a number >= 0")


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """Who foresees output lengths.

    Attributes:
        artefact: What ``farsight train`` wrote; empty: the lengths of the last outputs, whatever is asked.
        device: Where an encoder runs, as torch names it.
        cpu_share: Of one core that forecasts may take; beyond it they look at less.
        wait_s: A request waits so long for its forecast before it goes its way; one that comes later follows it.
        learn: Train anew while serving, on what was foreseen badly ...
        learn_every_s: ... so often; Magnus does it every three minutes (section III-B).
    """

    artefact: str = ""
    device: str = "cpu"
    cpu_share: float = 0.05
    wait_s: float = 0.0
    learn: bool = True
    learn_every_s: float = 180.0

    def __post_init__(self) -> None:
        _require(self.cpu_share > 0, "predictor.cpu_share", self.cpu_share, "a number > 0")
        _require(self.wait_s >= 0, "predictor.wait_s", self.wait_s, "a number >= 0")
        _require(self.learn_every_s > 0, "predictor.learn_every_s", self.learn_every_s, "a number > 0")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log of finished requests, forecasts and batches, and of what was learnt from them.

    Attributes:
        path: SQLite file, or the ``redis://`` URL of a server that syncs every write; empty keeps it with the server's
            temporary files, gone when the server ends.
        max_rows: Of finished requests, forecasts, accounts of decisions and batches, of each; the oldest are dropped.
        max_artefacts: Versions kept of each kind of artefact, beside the one in use.
    """

    path: str = ""
    max_rows: int = 1_000_000
    max_artefacts: int = 5

    def __post_init__(self) -> None:
        _require(
            "://" not in self.path or self.on_redis, "log.path", self.path, "a file, or a URL of redis:// or rediss://"
        )
        _require(self.max_rows >= 1, "log.max_rows", self.max_rows, "an integer >= 1")
        _require(self.max_artefacts >= 1, "log.max_artefacts", self.max_artefacts, "an integer >= 1")

    @property
    def on_redis(self) -> bool:
        """Whether ``path`` is the URL of a Redis server, and no file."""
        return self.path.startswith(("redis://", "rediss://"))


@dataclass(frozen=True, slots=True)
class FarsightConfig:
    """Everything that can be set; each field is a table of the TOML file.

    Attributes:
        replica: An array of tables: replicas that are other servers.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    log: LogConfig = field(default_factory=LogConfig)
    replica: tuple[ReplicaConfig, ...] = ()

    def __post_init__(self) -> None:
        count = self.model.replicas
        _require(count >= 1 or bool(self.replica), "model.replicas", count, "an integer >= 1, or a [[replica]] table")


def load_config(path: Path | None, overrides: dict[str, dict[str, Any]]) -> FarsightConfig:
    """Defaults, then the TOML file, then ``overrides`` (``{"server": {"port": 9000}}``; None values are skipped).

    Raises:
        ConfigError: unreadable file, unknown key (the nearest valid one is named) or a value of the wrong kind.
    """
    tables = _read_toml(path) if path is not None else {}
    for section, values in overrides.items():
        merged = tables.setdefault(section, {})
        merged.update({key: value for key, value in values.items() if value is not None})
    names = [f.name for f in dataclasses.fields(FarsightConfig)]
    for name in tables:
        if name not in names:
            raise ConfigError(name, tables[name], f"a known table{_nearest(name, names)}")
    replica = _replicas(tables.pop("replica", []))
    if replica and isinstance(tables.setdefault("model", {}), dict):
        tables["model"].setdefault("replicas", 0)
    sections = {f.name: f.default_factory for f in dataclasses.fields(FarsightConfig) if f.name != "replica"}
    return FarsightConfig(
        **{name: _section(kind, name, tables.get(name, {})) for name, kind in sections.items()}, replica=replica
    )


def _replicas(tables: Any) -> tuple[ReplicaConfig, ...]:
    if not isinstance(tables, list):
        raise ConfigError("replica", tables, "an array of tables, each under its own [[replica]]")
    return tuple(_section(ReplicaConfig, "replica", table) for table in tables)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError("--config", str(path), f"a readable TOML file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError("--config", str(path), f"a TOML file in UTF-8 ({error})") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("--config", str(path), f"valid TOML ({error})") from error


def _section(kind: Any, section: str, values: Any) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(section, values, "a table of settings")
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{section}.{key}", value, f"a known setting{_nearest(key, list(hints))}")
    return kind(**{key: _typed(f"{section}.{key}", value, hints[key]) for key, value in values.items()})


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(name, value, f"a value of type {kind.__name__}")
    return value


def _nearest(name: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1)
    return f"; did you mean {close[0]!r}?" if close else f", one of {', '.join(valid)}"


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(name, value, expected)
