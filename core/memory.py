"""Memory that the C library gives back, and a bound of what a zip file such as an ``.npz`` takes unpacked."""

from __future__ import annotations

import ctypes
import io
import zipfile

MAPPED_BYTES = 4 << 20
"""Size from which on a freed block goes back to the system at once; smaller blocks are used again."""

_M_MMAP_THRESHOLD = -3  # of malloc.h


def return_large_blocks() -> bool:
    """Has ``malloc`` map every block of ``MAPPED_BYTES`` or more by itself, for the rest of this process's life.

    glibc raises that bound, up to 32 MiB, with each larger block that is freed (mallopt(3), ``M_MMAP_THRESHOLD``). From
    then on blocks of that size come from the heaps of threads, which small blocks above them keep from shrinking: a
    process that handles pictures of all sizes grows long after the largest.

    Returns:
        Whether ``malloc`` does; only glibc has this call.
    """
    call = getattr(ctypes.CDLL(None), "mallopt", None)
    return call is not None and bool(call(_M_MMAP_THRESHOLD, MAPPED_BYTES))


def check_unpacked(data: bytes, max_entries: int, max_bytes: int) -> None:
    """Checks the size that a zip file states for its content, which may be a thousand times its own.

    Raises:
        ValueError: The content is larger, or the data is not a zip file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(str(error)) from error
    size = sum(entry.file_size for entry in entries)
    if size > max_bytes or len(entries) > max_entries:
        raise ValueError(f"{len(entries)} arrays of {size} bytes; at most {max_entries} and {max_bytes} are read")
