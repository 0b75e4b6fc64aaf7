"""Presets side by side on live components and emulated devices: ``python -m benchmarks.live_presets``.

Each run is a service in one process: real components and messages, a device that takes the time of a 7B model on an
A100, requests that come at given times. Every claim is measured on paired seeds and beside the simulator, which
runs the same arrivals, lengths and forecasts. Results are kept in a file: the same command again goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.live_presets import command
from benchmarks.live_presets.claims import CLAIMS
from benchmarks.live_presets.setups import SETUPS, SYSTEMS
from benchmarks.live_presets.study import Study

STUDY = Study(__doc__ or "", CLAIMS, SETUPS, SYSTEMS, Path("build/live_presets.jsonl"))


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures what is missing, prints and returns the rows."""
    return command.main(STUDY, words)


if __name__ == "__main__":
    main()
