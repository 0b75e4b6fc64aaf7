"""Named compositions of policies (design section 5): the table."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from farsight.core.errors import ConfigError, InvalidValueError
from farsight.policies.parts import load_parts


@dataclass(frozen=True, slots=True)
class Preset:
    """One row of the table: which registered part (``policies.parts``) fills each place.

    Attributes:
        mode: ``continuous``: each replica has a scheduler, requests join and leave at every step. ``batch``: idle
            workers pull formed batches from one central queue; ``order`` then says how they are formed and chosen.
        max_num_seqs: Most requests that run at once; 0 where the engine's own limit decides.
        weights: As ``EngineConfig.weights``.
    """

    name: str
    mode: Literal["continuous", "batch"]
    placement: str
    order: str
    admission: str
    kv: str
    max_num_seqs: int = 0
    weights: Literal["full", "int4"] = "full"


_PULL = "idle-worker"

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("fcfs", "continuous", "round-robin", "fcfs", "watermark", "recompute-newest"),
        Preset("magnus", "batch", _PULL, "wma-hrrn", "batch-memory", "split"),
        Preset("magnus-vs", "batch", _PULL, "fcfs-batches", "fixed-size", "split", max_num_seqs=7),
        Preset("magnus-vsq", "batch", _PULL, "fcfs-batches", "fixed-size", "split", max_num_seqs=10, weights="int4"),
        Preset("magnus-ccb", "continuous", "least-work", "fcfs", "watermark", "recompute-newest", max_num_seqs=7),
        Preset("magnus-glp", "batch", _PULL, "wma-fcfs", "batch-memory", "split", max_num_seqs=7),
        Preset("magnus-abp", "batch", _PULL, "wma-fcfs", "batch-memory", "split"),
        Preset("multi-bin", "batch", _PULL, "multi-bin", "fixed-size", "split", max_num_seqs=8),
        Preset("fastserve", "continuous", "least-work", "skip-join-mlfq", "watermark", "enst-proactive"),
        Preset("fastserve-defer", "continuous", "least-work", "skip-join-mlfq", "watermark", "enst-defer"),
        Preset("fastserve-reactive", "continuous", "least-work", "skip-join-mlfq", "watermark", "enst-reactive"),
        Preset("fastserve-recompute", "continuous", "least-work", "skip-join-mlfq", "watermark", "enst-recompute"),
        Preset("past-future", "continuous", "least-work", "fcfs", "past-future", "recompute-newest"),
        Preset("conservative", "continuous", "least-work", "fcfs", "conservative", "recompute-newest"),
        Preset("aggressive", "continuous", "least-work", "fcfs", "watermark", "recompute-newest"),
        Preset("preble", "continuous", "e2", "hit-groups", "watermark", "recompute-newest"),
        Preset("farsight", "continuous", "e2-forecast", "readers", "past-future", "cheapest-victim"),
        Preset("farsight-mean", "continuous", "e2-forecast", "gittins", "watermark", "cheapest-victim"),
    )
}


def register_preset(preset: Preset) -> None:
    """Adds a row. A package outside this repository calls this, besides registering its parts.

    Raises:
        InvalidValueError: The name is taken.
    """
    if preset.name in PRESETS:
        raise InvalidValueError("scheduler.preset", preset.name, "a name that no other preset has")
    PRESETS[preset.name] = preset


def max_running(preset: str, max_num_seqs: int, batch_size: int = 0) -> int:
    """Returns the most requests that one replica runs at once.

    Args:
        max_num_seqs: The engine's limit.
        batch_size: The configured batch size of batch mode; 0 is the preset's own.

    Raises:
        ConfigError: there is no such preset.
    """
    row = find_preset(preset)
    own = (batch_size if row.mode == "batch" else 0) or row.max_num_seqs
    return min(own or max_num_seqs, max_num_seqs)


def find_preset(name: str) -> Preset:
    """Returns the preset of this name.

    Raises:
        ConfigError: there is no such preset; the error names the nearest.
    """
    load_parts()
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ConfigError("scheduler.preset", name, f"one of {', '.join(PRESETS)}{hint}")
