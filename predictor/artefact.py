"""A trained predictor on disk: plain arrays and JSON in one ``.npz`` file, checked before use. Never a pickle."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import FarsightError

FILE_NAME = "forecaster.npz"
"""In the directory that ``farsight train`` writes."""

FORMAT = 1
"""Of the file; another one is refused."""

_METADATA = "metadata.json"


class ArtefactError(FarsightError):
    """A file that is no artefact of this format, or is damaged."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """What training leaves behind.

    Attributes:
        metadata: JSON values: ``kind``, ``version``, ``encoder`` and whatever the kind needs.
        arrays: By name; no objects among them.
    """

    metadata: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    def to_bytes(self) -> bytes:
        """The file's content: a zip of arrays with ``metadata.json`` (``unzip -p FILE metadata.json``). O(size)."""
        metadata = {**self.metadata, "format": FORMAT}
        metadata["checksum"] = _checksum(metadata, self.arrays)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **dict(self.arrays))
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.writestr(_METADATA, json.dumps(metadata, indent=1, sort_keys=True))
        return buffer.getvalue()

    def save(self, directory: Path) -> Path:
        """Writes ``FILE_NAME`` into ``directory``, made if need be; a reader sees the old file or the new one.

        Raises:
            OSError: it cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        # Of this process alone: two trainings into one directory must not write into the same file.
        unfinished = path.with_name(f"{FILE_NAME}.{os.getpid()}.tmp")
        unfinished.write_bytes(self.to_bytes())
        unfinished.replace(path)
        return path


def from_bytes(data: bytes, name: str = "artefact") -> Artefact:
    """The artefact in ``data``.

    Args:
        data: From ``Artefact.to_bytes``.
        name: Of the source, for errors.

    Raises:
        ArtefactError: cut off, changed, of another format, or no artefact at all.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            metadata = json.loads(archive[_METADATA])
            arrays = {each: archive[each] for each in archive.files if each != _METADATA}
    except Exception as error:  # whatever zip, npy and JSON readers stumble over in foreign bytes
        raise ArtefactError(f"{name}: no forecast artefact, or cut off ({error}); train it anew") from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        found = metadata.get("format") if isinstance(metadata, dict) else None
        raise ArtefactError(f"{name}: format {found}, but this Farsight reads {FORMAT}; train it anew")
    checksum = metadata.pop("checksum", None)
    if checksum != _checksum(metadata, arrays):
        raise ArtefactError(f"{name}: damaged, its checksum does not fit; train it anew or copy it again")
    del metadata["format"]
    return Artefact(metadata, arrays)


def load(path: Path) -> Artefact:
    """The artefact in a directory of ``farsight train``, or in the file itself.

    Raises:
        ArtefactError: not there, or see ``from_bytes``.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{file}: cannot be read ({error.strerror}); `farsight train` makes it") from error
    return from_bytes(data, str(file))


def _checksum(metadata: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
