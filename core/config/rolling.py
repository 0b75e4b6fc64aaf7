"""Settings that a running service takes over, replica after replica; all others change with a restart."""

from __future__ import annotations

import dataclasses
from typing import Any

from core.config.load import FarsightConfig, load_config
from core.errors import ConfigError

ROLLING = (
    *("kv_memory", "host_kv_memory", "max_batch_tokens", "num_threads", "gpu_memory_utilization"),
    *("backend", "compile", "weights", "kv_dtype", "speculation"),
)
"""Settings of ``[engine]`` that the workers of a replica alone read, and read when they start."""


def rolling_settings(running: FarsightConfig, tables: dict[str, Any]) -> dict[str, Any]:
    """The settings of ``[engine]`` that a configuration file names and a rolling change can make so.

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
    found = {}
    for section, key in ((section, key) for section, values in tables.items() for key in values):
        old, new = (getattr(getattr(config, section), key) for config in (running, wanted))
        if section == "engine" and key in ROLLING:
            found[key] = new
        elif new != old:
            expected = f"{old!r}, the running value; it changes with a restart (what rolls: {', '.join(ROLLING)})"
            raise ConfigError(f"{section}.{key}", new, expected)
    dataclasses.replace(running.engine, **found)  # raises where they contradict a setting that stays
    return found
