"""Settings that a running service takes over, replica after replica; all others change with a restart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from farsight.core.config.load import FarsightConfig, load_config
from farsight.core.errors import ConfigError

AT_ONCE = "server"
"""Section whose rolling settings the ingress replicas take over as they run; no process starts again for them."""

ROLLING: Mapping[str, tuple[str, ...]] = {
    "engine": (
        *("kv_memory", "host_kv_memory", "max_batch_tokens", "num_threads", "gpu_memory_utilization"),
        *("backend", "compile", "weights", "kv_dtype", "speculation", "long_factors"),
    ),
    "scheduler": (
        *("gamma", "tail", "max_gap_ms", "watermark", "standby_slots", "quantum_s", "quantum_ratio", "num_levels"),
        *("starve_limit_s", "min_idle_slots", "num_burst_levels", "reserve_ratio", "history_window", "overcommit"),
    ),
    AT_ONCE: (
        *("max_queued_requests", "max_queued_tokens", "max_queued_requests_per_key", "max_queued_tokens_per_key"),
        *("max_wait_s", "first_token_deadline_s"),
    ),
    "placement": (
        *("window_s", "rebalance", "rebalance_ratio", "rebalance_after", "autoscale", "balance", "imbalance_ratio"),
        *("balanced_ratio", "initial_output_len", "max_tree_mib", "recall"),
    ),
    "batch": (
        *("wma_threshold", "knn_neighbours", "num_bins", "max_wait_s", "forecast_wait_s", "reload_s"),
        *("learn_every_s", "learn_min_error_s", "learn_min_share"),
    ),
    "predictor": ("num_trees", "cpu_share", "learn", "learn_every_s", "learn_min_error", "learn_min_share"),
}
"""Rolling settings by section. Each is read in one place: by the workers of a replica or by its Scheduler, when they
start; by the ingress replicas, to check requests; or by the components in ``READERS``."""

READERS: Mapping[str, tuple[str, ...]] = {
    "placement": ("router",),
    "batch": ("router", "serving-time-estimator"),
    "predictor": ("length-predictor",),
}
"""By section: kinds of components of the whole service that start again where one of its rolling settings changes. No
replica starts again for them."""

Changes = dict[str, dict[str, Any]]
"""Settings by section that differ from those of the start."""


def rolling_settings(running: FarsightConfig, tables: dict[str, Any]) -> Changes:
    """Returns the settings of a configuration file that a rolling change can apply.

    Settings that the file does not name stay as they are.

    Args:
        tables: The file's tables.

    Raises:
        ConfigError: The file names a setting that is wrong, or one that differs from the running value and cannot roll.
    """
    if "replica" in tables:
        raise ConfigError("replica", "[[replica]]", "no such table: other servers change with a restart")
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise ConfigError(name, values, "a table of settings")
    wanted = load_config(None, tables)
    found: Changes = {}
    for section, key in ((section, key) for section, values in tables.items() for key in values):
        old, new = (getattr(getattr(config, section), key) for config in (running, wanted))
        if key in ROLLING.get(section, ()):
            found.setdefault(section, {})[key] = new
        elif new != old:
            expected = f"{old!r}, the running value; it changes with a restart ({_what_rolls(section)})"
            raise ConfigError(f"{section}.{key}", new, expected)
    changed(running, found)  # raises if the new settings contradict one that stays
    return found


def _what_rolls(section: str) -> str:
    if section in ROLLING:
        return f"what rolls in [{section}]: {', '.join(ROLLING[section])}"
    return f"settings of {', '.join(f'[{each}]' for each in ROLLING)} roll"


def changed(config: FarsightConfig, changes: Changes) -> FarsightConfig:
    """Returns the configuration with these settings.

    Raises:
        ConfigError: The new settings contradict others.
    """
    sections = {name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
    return dataclasses.replace(config, **sections)


def differing(config: FarsightConfig, changes: Changes) -> str:
    """Returns the changes whose values the configuration does not have yet, as JSON with sorted keys."""
    kept = {
        section: {name: value for name, value in values.items() if value != getattr(getattr(config, section), name)}
        for section, values in changes.items()
    }
    return json.dumps({section: values for section, values in kept.items() if values}, sort_keys=True)


def merged(one: Changes, other: Changes) -> Changes:
    """Returns both sets of changes together; where both change a setting, ``other`` wins."""
    return {section: one.get(section, {}) | other.get(section, {}) for section in {*one, *other}}


def at_once(changes: str) -> str:
    """Returns the changes that ingress replicas take over as they run, as JSON."""
    return _only(changes, lambda section: section == AT_ONCE)


def of_replicas(changes: str) -> str:
    """Returns the changes that need the replicas to start again, as JSON."""
    return _only(changes, lambda section: section != AT_ONCE and section not in READERS)


def readers(one: str, other: str) -> tuple[str, ...]:
    """Returns the kinds of components in ``READERS`` whose settings differ between two sets of changes, in JSON."""
    before, after = json.loads(one), json.loads(other)
    kinds = {kind for section in READERS if before.get(section) != after.get(section) for kind in READERS[section]}
    return tuple(sorted(kinds))


def _only(changes: str, is_wanted: Callable[[str], bool]) -> str:
    found: Changes = json.loads(changes)
    return json.dumps({name: values for name, values in found.items() if is_wanted(name)}, sort_keys=True)
