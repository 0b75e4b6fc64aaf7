"""Blocks of KV in files: one file a block, written once, checked when it is read. No torch.

``DIR/<identity>/<tenant>/<name>-<parent>.kv``. Only the user of this process may read the folder: another's folder, or
one that others may open, is refused. A file is written under a name of its own and then renamed, so that a reader finds
a whole file or none; what a power cut leaves of it fails its checksum. Workers of one host share the folder: the
listing is the index, and who finds a file missing computes the block again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from farsight.core.errors import ConfigError
from farsight.core.messages.kv import BlockName, KVIdentity

_HEADER = struct.Struct("<8s16sQQQ8s")
_MAGIC = b"FSKV0002"
_ABOUT = "identity.json"
_CHECKSUMS = "weights.json"
_TENANT = "tenant-"
_FILE = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})\.kv")
_HASHED = re.compile(r"#[0-9a-f]{64}")
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"[0-9a-f]{16}\.\d+\.\d+\.part")
_LEFT_BEHIND_S = 60.0
"""A part of a file that is older belongs to a process that has died."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class KeptTenant:
    """What a folder has of one tenant, for one identity.

    Attributes:
        about: The fields of the identity; empty where its description cannot be read.
        used_at: When one of the files was used last, in seconds since the epoch.
    """

    identity: str
    tenant: str
    about: dict[str, object]
    num_files: int
    num_bytes: int
    used_at: float


def open_folder(directory: Path, field: str = "engine.disk_kv") -> Path:
    """Makes the folder, or checks the one that is there.

    Raises:
        ConfigError: It is no folder, another user's, or open to others.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(field, str(directory), f"a folder that can be written ({error.strerror})") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(field, str(directory), "a folder of the user who runs the server, and no link")
    if found.st_mode & 0o077:
        raise ConfigError(field, str(directory), f"a folder that no one else may open: chmod 700 {directory}")
    return directory


class KVFiles:
    """The files of one identity. Every method may be called from any thread and by several processes at once.

    Args:
        directory: As of ``open_folder``.
    """

    def __init__(self, directory: Path, identity: KVIdentity) -> None:
        self._identity = identity
        self._digest = identity.digest()
        self._size = _HEADER.size + identity.block_bytes
        self.path = open_folder(directory) / self._digest.hex()
        self.path.mkdir(mode=0o700, exist_ok=True)
        about = self.path / _ABOUT
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(about, flags, 0o600)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps(asdict(identity)).encode(), 0)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # says that this identity is in use, until the process ends

    def close(self) -> None:
        """Says that this process no longer uses the files."""
        os.close(self._lock)

    def _file(self, block: BlockName) -> Path:
        return self.path / _folder_of(block.owner) / f"{block.name:016x}-{block.parent:016x}.kv"

    def blocks(self) -> list[BlockName]:
        """Returns all blocks that have a file of the right size, least recently used first; drops what died half-way.

        O(files): the names and times alone are read.
        """
        found = []
        for folder, tenant in _tenants(self.path):
            for entry, about in _files(folder):
                match = _FILE.fullmatch(entry.name)
                if match is not None and about.st_size == self._size:
                    found.append((about.st_mtime_ns, int(match[1], 16), int(match[2], 16), tenant))
                elif match is not None or (_PART.fullmatch(entry.name) and _is_old(about)):
                    _remove(Path(entry.path))
        found.sort()
        return [BlockName(name, parent, tenant) for _, name, parent, tenant in found]

    def find(self, names: Sequence[int], tenant: str) -> list[BlockName]:
        """Returns which blocks of a chain another process has written: a beginning of it. O(log n) looks.

        Args:
            names: The chain; the first block has no parent.
        """
        blocks = _chain(names, tenant)
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if self._file(blocks[middle]).exists():
                low = middle + 1
            else:
                high = middle
        return blocks[:low]

    def read_ahead(self, names: Sequence[int], tenant: str, first: int) -> None:
        """Asks the system to read the files of a chain, from block ``first`` on; returns before they are read."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        with contextlib.suppress(OSError):  # one that is missing: those behind it are of no use
            for block in _chain(names, tenant)[first:]:
                handle = os.open(self._file(block), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(handle, 0, self._size, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(handle)

    def write(self, block: BlockName, payload: memoryview) -> None:
        """Writes a block, unless it is there.

        Raises:
            OSError: It could not be written; nothing of it is left.
        """
        path = self._file(block)
        with contextlib.suppress(OSError):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode) and about.st_size == self._size:
                return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f"{block.name:016x}.{os.getpid()}.{next(_numbers)}.part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                header = _HEADER.pack(*self._fields(block), self._checksum(block, payload))
                written = os.writev(handle, (header, payload))
                while written < self._size:
                    more = os.write(handle, payload[written - _HEADER.size :])
                    written += more
            finally:
                os.close(handle)
            part.replace(path)
        except BaseException:
            _remove(part)
            raise

    def read(self, block: BlockName, payload: memoryview) -> bool:
        """Reads a block into ``payload``; False, with anything in it, if the file is missing or not as it was."""
        try:
            handle = os.open(self._file(block), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode) or about.st_size != self._size:
                return False
            header = bytearray(_HEADER.size)
            if os.readv(handle, (header, payload)) != self._size and not self._read_on(handle, header, payload):
                return False
            *fields, checksum = _HEADER.unpack(header)
            if tuple(fields) != self._fields(block) or checksum != self._checksum(block, payload):
                return False
            os.utime(handle)  # whatever process makes room later sees that it was used
        except OSError:
            return False
        finally:
            os.close(handle)
        return True

    def _read_on(self, handle: int, header: bytearray, payload: memoryview) -> bool:
        """Reads again from the beginning, piece by piece, where one call has read less than all."""
        os.lseek(handle, 0, os.SEEK_SET)
        for target in (memoryview(header), payload):
            at = 0
            while at < len(target):
                num = os.readv(handle, (target[at:],))
                if num == 0:
                    return False
                at += num
        return True

    def _fields(self, block: BlockName) -> tuple[bytes, bytes, int, int, int]:
        return _MAGIC, self._digest, block.name, block.parent, self._identity.block_bytes

    def _checksum(self, block: BlockName, payload: memoryview) -> bytes:
        """Returns 64 bits against accidents: who may write here could write any checksum.

        Two CRCs take half the time of SHA-256, which is what a block that comes back costs most.
        """
        middle = len(payload) // 2
        first = zlib.crc32(payload[:middle], zlib.crc32(_HEADER.pack(*self._fields(block), b"")))
        return struct.pack("<II", first, zlib.crc32(payload[middle:]))

    def remove(self, block: BlockName) -> None:
        """Deletes a block, if it is there."""
        _remove(self._file(block))


def _chain(names: Sequence[int], tenant: str) -> list[BlockName]:
    return [BlockName(name, names[i - 1] if i else 0, tenant) for i, name in enumerate(names)]


def _is_old(about: os.stat_result) -> bool:
    return time.time() - about.st_mtime > _LEFT_BEHIND_S


def _folder_of(tenant: str) -> str:
    """Returns a name that cannot lead elsewhere; too long a one is hashed, as ``_tenants`` then calls the tenant."""
    name = quote(tenant, safe="#") if _HASHED.fullmatch(tenant) else quote(tenant, safe="")
    return _TENANT + (name if len(name) <= 200 else "#" + hashlib.sha256(tenant.encode()).hexdigest())


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from entries


def _files(folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yields regular files and what is known of them; others may be deleting some meanwhile."""
    for entry in _entries(folder):
        try:
            if entry.is_file(follow_symlinks=False):
                yield entry, entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue


def _folders(folder: Path) -> Iterator[Path]:
    return (Path(entry.path) for entry in _entries(folder) if entry.is_dir(follow_symlinks=False))


def _tenants(path: Path) -> Iterator[tuple[Path, str]]:
    for folder in _folders(path):
        if folder.name.startswith(_TENANT):
            yield folder, unquote(folder.name.removeprefix(_TENANT))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _identities(directory: Path) -> Iterator[Path]:
    return (folder for folder in _folders(directory) if _IDENTITY.fullmatch(folder.name))


def kept_in(directory: Path) -> list[KeptTenant]:
    """Returns what a folder has, by identity and tenant."""
    found = []
    for folder in _identities(directory):
        about: dict[str, object] = {}
        with contextlib.suppress(OSError, ValueError):
            about = dict(json.loads((folder / _ABOUT).read_bytes()))
        for tenant_folder, tenant in _tenants(folder):
            files = [about for _, about in _files(tenant_folder)]
            num_bytes, used_at = sum(each.st_size for each in files), max((each.st_mtime for each in files), default=0)
            found.append(KeptTenant(folder.name, tenant, about, len(files), num_bytes, used_at))
    return found


def clear(directory: Path, tenant: str | None = None) -> int:
    """Deletes the blocks of a tenant, or of all; returns how many. Servers that use them compute them again."""
    num_files = 0
    for folder in _identities(directory):
        for tenant_folder, name in _tenants(folder):
            if tenant is None or _folder_of(tenant) == _folder_of(name):
                num_files += sum(1 for _ in _files(tenant_folder))
                shutil.rmtree(tenant_folder, ignore_errors=True)
    return num_files


def bound(directory: Path, num_bytes: int) -> int:
    """Deletes the least recently used blocks until a folder has at most so many bytes; returns how many blocks."""
    files = []
    for folder in _identities(directory):
        for tenant_folder, _ in _tenants(folder):
            files += [(about.st_mtime_ns, about.st_size, entry.path) for entry, about in _files(tenant_folder)]
    total, num_files = sum(size for _, size, _ in files), 0
    for _, size, path in sorted(files):
        if total <= num_bytes:
            break
        _remove(Path(path))
        total, num_files = total - size, num_files + 1
    return num_files


def drop_unused(directory: Path, num_bytes: int) -> None:
    """Deletes what other models or builds have left, the oldest first, while a folder has more than ``num_bytes``."""
    sizes = dict.fromkeys(_identities(directory), 0)
    for kept in kept_in(directory):
        folder = directory / kept.identity
        sizes[folder] = sizes.get(folder, 0) + kept.num_bytes
    total = sum(sizes.values())
    for folder in sorted(sizes, key=_opened_at):
        if total > num_bytes and not _is_used(folder / _ABOUT):
            shutil.rmtree(folder, ignore_errors=True)
            total -= sizes[folder]


def _opened_at(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / _ABOUT).lstat().st_mtime
    return 0.0


def _is_used(about: Path) -> bool:
    """Returns whether a process holds this description (``KVFiles``)."""
    try:
        handle = os.open(about, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def weights_checksum(model: Path, directory: Path) -> str:
    """Returns the checksum of a model's files, each kept in ``directory`` while its size and time stay the same."""
    kept: dict[str, str] = {}
    notes = directory / _CHECKSUMS
    with contextlib.suppress(OSError, ValueError):
        kept = {str(key): str(value) for key, value in json.loads(notes.read_bytes()).items()}
    total = hashlib.sha256()
    for path in _model_files(model):
        about = path.stat()
        key = f"{about.st_dev}:{about.st_ino}:{about.st_size}:{about.st_mtime_ns}"
        if key not in kept:
            with path.open("rb") as file:
                kept[key] = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name} {kept[key]}\n".encode())
    part = notes.with_name(f"{_CHECKSUMS}.{os.getpid()}.{next(_numbers)}")
    part.write_text(json.dumps(kept), encoding="utf-8")
    part.chmod(0o600)
    part.replace(notes)
    return total.hexdigest()


def _model_files(model: Path) -> Iterable[Path]:
    if model.is_file():
        return (model,)
    return sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".gguf", ".bin", ".json"))
