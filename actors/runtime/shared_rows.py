"""Where processes of a service share rows of images."""

from __future__ import annotations

import os
from pathlib import Path

from farsight.actors.runtime.names import RUN_DIR_VARIABLE
from farsight.engine.vision.row_files import drop_rows


def rows_directory() -> Path | None:
    """Returns the directory of shared rows, which ends with its private cluster, whose processes are on one machine.
    None in any other cluster: there, requests carry their rows."""
    directory = os.environ.get(RUN_DIR_VARIABLE)
    return Path(directory, "rows") if directory else None


def drop_rows_of(component: str) -> None:
    """Drops the rows of a component that was removed, which no successor will find. Only ImageEncoders keep rows."""
    directory = rows_directory()
    if directory is not None:
        drop_rows(directory, component)
