"""Bounds what is unpacked from a zip file, such as an ``.npz`` of arrays."""

from __future__ import annotations

import io
import zipfile


def check_unpacked(data: bytes, max_entries: int, max_bytes: int) -> None:
    """Checks what a zip file says that it holds: that may be a thousand times its own size.

    Raises:
        ValueError: It holds more, or is no zip file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(str(error)) from error
    size = sum(entry.file_size for entry in entries)
    if size > max_bytes or len(entries) > max_entries:
        raise ValueError(f"{len(entries)} arrays of {size} bytes; at most {max_entries} and {max_bytes} are read")
