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

from farsight.core.errors import FarsightError
from farsight.core.processors import check_unpacked

FILE_NAME = "forecaster.npz"
"""Name of the artefact's file in the directory that ``farsight train`` writes."""

FORMAT = 1
"""Format version of the file; files of another version are refused."""

MAX_UNPACKED = 1 << 30
"""Most bytes of arrays."""

MAX_ARRAYS = 1000

_METADATA = "metadata.json"


class ArtefactError(FarsightError):
    """A file that is no artefact of this format, or is damaged."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The result of a training.

    Attributes:
        metadata: JSON values: ``kind``, ``version``, ``encoder`` and whatever the kind needs.
        arrays: Arrays by name; no object arrays.
    """

    metadata: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    def to_bytes(self) -> bytes:
        """Returns the file: a zip of arrays with ``metadata.json`` (``unzip -p FILE metadata.json``). O(size)."""
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
            OSError: The file cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        # A name for this process alone: two trainings into one directory must not write into the same file.
        unfinished = path.with_name(f"{FILE_NAME}.{os.getpid()}.tmp")
        unfinished.write_bytes(self.to_bytes())
        unfinished.replace(path)
        return path


def from_bytes(data: bytes, name: str = "artefact") -> TrainedModel:
    """Reads the artefact in ``data``.

    Args:
        data: From ``TrainedModel.to_bytes``.
        name: Name of the source, for errors.

    Raises:
        ArtefactError: The data is cut off, changed, of another format, or no artefact at all.
    """
    try:
        check_unpacked(data, MAX_ARRAYS, MAX_UNPACKED)
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            metadata = json.loads(archive[_METADATA])
            arrays = {each: archive[each] for each in archive.files if each != _METADATA}
    except Exception as error:  # the zip, npy and JSON readers raise many types on foreign bytes
        raise ArtefactError(f"{name}: no forecast artefact, or cut off ({error}); train it again") from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        found = metadata.get("format") if isinstance(metadata, dict) else None
        raise ArtefactError(f"{name}: format {found}, but this Farsight reads {FORMAT}; train it again")
    checksum = metadata.pop("checksum", None)
    if checksum != _checksum(metadata, arrays):
        raise ArtefactError(f"{name}: damaged, its checksum does not match; train it again or copy it again")
    del metadata["format"]
    return TrainedModel(metadata, arrays)


def load(path: Path) -> TrainedModel:
    """Reads the artefact in a directory of ``farsight train``, or in the file itself.

    Raises:
        ArtefactError: The file is missing, or as in ``from_bytes``.
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
