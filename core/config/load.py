"""All tables together, read from TOML, overridden by flags; a wrong key or value is named."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farsight.core.config.actors import ActorsConfig, ReplicaConfig
from farsight.core.config.engine import EMULATED, EngineConfig, ModelConfig
from farsight.core.config.images import ImagesConfig
from farsight.core.config.learning import LogConfig, PredictorConfig
from farsight.core.config.scheduling import BatchConfig, PlacementConfig, SchedulerConfig
from farsight.core.config.server import AccessConfig, FilesConfig, ServerConfig, TracesConfig
from farsight.core.errors import ConfigError, require


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
    access: AccessConfig = field(default_factory=AccessConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    log: LogConfig = field(default_factory=LogConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    files: FilesConfig = field(default_factory=FilesConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    replica: tuple[ReplicaConfig, ...] = ()

    def __post_init__(self) -> None:
        count = self.model.replicas
        require(count >= 1 or bool(self.replica), "model.replicas", count, "an integer >= 1, or a [[replica]] table")
        self._check_cutting_off()
        if self.engine.benchmark_mode:
            object.__setattr__(self, "server", self.server.unbounded())

    @property
    def gpus_per_rank(self) -> float:
        """GPUs that each rank of a replica is to have."""
        asked = self.actors.gpus_per_rank
        return float(self.engine.device == "cuda") if asked < 0 or self.model.num_ranks == 1 else asked

    def _check_cutting_off(self) -> None:
        if self.scheduler.mlfq != "preemption":
            return
        device, model = self.engine.device, self.model
        expected = "skip-join or no-preemption: iterations are cut off on cpu and emulated devices, of one rank"
        cuts_off = device == "cpu" or device.startswith(EMULATED)
        one = model.tensor_parallel == model.pipeline_parallel == 1
        require(cuts_off and one and not self.replica, "scheduler.mlfq", "preemption", expected)


def load_config(path: Path | None, overrides: dict[str, dict[str, Any]]) -> FarsightConfig:
    """Applies the TOML file, then ``overrides`` (``{"server": {"port": 9000}}``; None values are skipped).

    Raises:
        ConfigError: unreadable file, or as ``make_config``.
    """
    tables = read_toml(path) if path is not None else {}
    for section, values in overrides.items():
        merged = tables.setdefault(section, {})
        merged.update({key: value for key, value in values.items() if value is not None})
    return make_config(tables)


def make_config(tables: dict[str, Any]) -> FarsightConfig:
    """Makes the configuration from tables, as the TOML file has them; settings that are not in them have defaults.

    Raises:
        ConfigError: unknown key (the nearest valid one is named) or a value of the wrong kind.
    """
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


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the tables of the file. Raises ConfigError if it cannot be read or is not TOML."""
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
