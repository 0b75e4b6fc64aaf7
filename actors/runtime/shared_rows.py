"""Where processes of a service share rows of images."""

from __future__ import annotations

import os
from pathlib import Path

from actors.runtime.names import RUN_DIR_VARIABLE
from engine.vision.row_files import drop_rows


def rows_directory() -> Path | None:
    """In the directory of a private cluster, all of whose processes are on one machine, and which ends with it. None in
    any other cluster: there, rows go with the requests."""
    directory = os.environ.get(RUN_DIR_VARIABLE)
    return Path(directory, "rows") if directory else None


def drop_rows_of(component: str) -> None:
    """Drops what a component that was taken away has kept, and no successor will find. Only ImageEncoders keep any."""
    directory = rows_directory()
    if directory is not None:
        drop_rows(directory, component)
