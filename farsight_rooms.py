"""Checks that the rooms of Farsight are its own, before any is used.

The rooms have plain names (``core``, ``services``), which other projects use as well. A package of such a name that
comes first on Python's path, or half of another checkout, would fail later with an error about something else. This
module has a name of its own and imports none of the rooms, so it can tell.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOMS = (
    "core",
    "tokenization",
    "kvcache",
    "policies",
    "predictor",
    "estimator",
    "engine",
    "actors",
    "simulator",
    "services",
)
HOME = Path(__file__).parent

_checked = False


class ShadowedRoomError(ImportError):
    """A name of a room stands for a package that is not part of this Farsight."""


def check_rooms() -> None:
    """Looks each room up as an import would, without importing it; at once where that has been done before.

    Raises:
        ShadowedRoomError: Names the room, where it was found, where it should be, and what to do.
    """
    global _checked
    if _checked:
        return
    for room in ROOMS:
        found = _found(room)
        if found is None:
            raise ShadowedRoomError(
                f"the package {room!r} is missing beside {__file__}: install Farsight again (make setup)",
                name=room,
            )
        if found != HOME / room and found.resolve() != (HOME / room).resolve():
            raise ShadowedRoomError(_explained(room, found), name=room, path=str(found))
    _checked = True


def main() -> None:
    """The ``farsight`` command."""
    try:
        check_rooms()
    except ShadowedRoomError as error:
        sys.exit(f"farsight: {error}")
    from services.cli import app

    app()


def _found(room: str) -> Path | None:
    """The folder of a package, or the file of a module of that name."""
    spec = importlib.util.find_spec(room)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else spec.origin or "")


def _explained(room: str, found: Path) -> str:
    begin = f"the package {room!r} is found at {found}, but this Farsight is at {HOME}"
    if (found.parent / Path(__file__).name).exists():
        return (
            f"{begin}: that is another checkout of Farsight. Unset PYTHONPATH, or use that checkout's own environment."
        )
    return (
        f"{begin}: another project's {room!r} comes first on Python's path. Use an environment that holds "
        f"Farsight alone, start outside {found.parent} and take it off PYTHONPATH, or remove that package."
    )
