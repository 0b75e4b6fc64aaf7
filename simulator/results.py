"""Results as files: the same run gives the same bytes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from simulator.experiment import Experiment
from simulator.records import Record
from simulator.summary import Summary

CONFIG_FILE, SUMMARY_FILE, REQUESTS_FILE = "config.json", "summary.json", "requests.jsonl"


def to_json(value: Mapping[str, Any], *, indent: int | None = None) -> str:
    """With sorted keys, floats by ``repr``, and null for what is no number; no line end."""
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
    """Everything that is needed to run it again, the version of Farsight included."""
    config = {**dataclasses.asdict(experiment), "farsight_version": importlib.metadata.version("farsight")}
    return config | ({"rate": "inf"} if experiment.rate == math.inf else {})


def request_row(record: Record) -> dict[str, Any]:
    """One ended request; instants in seconds from the start, lengths in tokens."""
    arrival = record.arrival
    return {
        "request_id": arrival.request_id,
        "app": arrival.app,
        "replica": record.replica,
        "prompt_len": arrival.prompt_len,
        "cached_len": record.cached_len,
        "output_len": record.num_tokens,
        "predicted_len": None if arrival.forecast is None else arrival.forecast.mean,
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
        OSError: It cannot be written.
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
