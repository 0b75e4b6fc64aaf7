"""Writes results to files: the same run gives the same bytes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from farsight.core.config.scheduling import BatchConfig, PlacementConfig, SchedulerConfig
from farsight.core.costs import FREE_IMAGES
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.simulator.cluster.latency import LinearLatency, Roofline
from farsight.simulator.cluster.records import Record
from farsight.simulator.experiment import Experiment
from farsight.simulator.summary import Summary

_EARLIER = ("preset", "watermark")
"""Settings of ``scheduler`` that are written beside it too, as earlier versions did."""

CONFIG_FILE, SUMMARY_FILE, REQUESTS_FILE = "config.json", "summary.json", "requests.jsonl"


def to_json(value: Mapping[str, Any], *, indent: int | None = None) -> str:
    """JSON with sorted keys, floats by ``repr`` and null for non-finite numbers; no line end."""
    return json.dumps(_plain(value), sort_keys=True, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def config_of(experiment: Experiment) -> dict[str, Any]:
    """All settings needed to repeat the run, including the version of Farsight."""
    config = {**dataclasses.asdict(experiment), "farsight_version": importlib.metadata.version("farsight")}
    config |= {name: getattr(experiment.scheduler, name) for name in _EARLIER}
    return config | ({"rate": "inf"} if experiment.rate == math.inf else {})


def read_config(path: Path) -> Experiment:
    """Reads the experiment of a file that ``write_results`` wrote, perhaps in another version of Farsight.

    Raises:
        ConfigError: The file cannot be read, or a field is missing, unknown or of the wrong type.
        InvalidValueError: A field has an invalid value.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--config", str(path), f"a config.json that simulate --out wrote ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError("--config", str(path), "a JSON object")
    config.pop("farsight_version", None)
    _with_policies(config)
    if config.get("rate") == "inf":
        config["rate"] = math.inf
    latency = config.get("latency")
    kind = Roofline if isinstance(latency, dict) and "gpu" in latency else LinearLatency
    _without_images(latency)
    return _built(Experiment, config, "config", {"latency": kind})


def _with_policies(config: dict[str, Any]) -> None:
    """Adds settings of policies that earlier versions did not write: they had a preset and a watermark."""
    for name, kind in (("batch", BatchConfig), ("placement", PlacementConfig)):
        config.setdefault(name, dataclasses.asdict(kind()))
    given = {name: config.pop(name) for name in _EARLIER if name in config}
    config.setdefault("scheduler", dataclasses.asdict(SchedulerConfig()) | given)
    config.setdefault("scaling", None)


def _without_images(latency: Any) -> None:
    """Adds what earlier versions, which knew no pictures, did not write."""
    if not isinstance(latency, dict):
        return
    if "gpu" not in latency:
        latency.setdefault("image_cost", dataclasses.asdict(FREE_IMAGES))
    elif isinstance(latency.get("model"), dict):
        latency["model"].setdefault("vision", None)


_Built = typing.TypeVar("_Built")


def _built(kind: type[_Built], values: Any, where: str, chosen: Mapping[str, type] | None = None) -> _Built:
    """A dataclass from its fields, which must all be present."""
    if not isinstance(values, dict):
        raise InvalidValueError(where, values, "a JSON object")
    hints = {**typing.get_type_hints(kind), **(chosen or {})}
    for name in values:
        if name not in hints:
            raise InvalidValueError(f"{where}.{name}", values[name], f"no such field, but {', '.join(hints)}")
    for name in hints:
        if name not in values:
            raise InvalidValueError(f"{where}.{name}", None, "a value")
    return kind(**{name: _typed(hint, values[name], f"{where}.{name}") for name, hint in hints.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _built(hint, value, where)
    kinds = typing.get_args(hint) or (hint,)
    if type(value) is int and float in kinds:
        return float(value)
    if value is None and type(None) in kinds:
        return None
    part = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
    if part is not None:
        return _typed(part, value, where)
    if type(value) not in kinds:
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InvalidValueError(where, value, f"a value of type {expected}")
    return value


def request_row(record: Record) -> dict[str, Any]:
    """One ended request; instants in seconds from the start, lengths in tokens."""
    arrival = record.arrival
    return {
        "request_id": arrival.request_id,
        "app": arrival.app,
        "replica": record.replica,
        "prompt_len": arrival.prompt_len,
        "image_tokens": sum(image.tokens for image in arrival.images),
        "cached_len": record.cached_len,
        "output_len": record.num_tokens,
        "predicted_len": None if arrival.forecast is None else arrival.forecast.within(arrival.max_new_tokens).mean,
        "arrived_at": arrival.arrived_at,
        "first_token_at": record.first_token_at,
        "finished_at": record.finished_at,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "mtpot_s": record.max_gap_s,
        "jct_s": record.jct_s,
        "num_evictions": record.num_evictions,
        "num_swaps": record.num_swaps,
    }


def write_results(
    directory: Path, experiment: Experiment, summary: Summary, records: Iterable[Record] | None = None
) -> list[Path]:
    """Writes ``config.json`` and ``summary.json`` and, given records, ``requests.jsonl`` with a line for each in the
    order they ended; returns the paths. The directory is made if it is not there.

    Raises:
        OSError: A file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / CONFIG_FILE, directory / SUMMARY_FILE]
    for path, value in zip(paths, (config_of(experiment), summary.to_dict()), strict=True):
        path.write_text(to_json(value, indent=1) + "\n", "utf-8")
    if records is not None:
        paths.append(directory / REQUESTS_FILE)
        with paths[-1].open("w", encoding="utf-8") as lines:
            lines.writelines(to_json(request_row(record)) + "\n" for record in records)
    return paths
