"""Moves cached blocks between the device's pool, the host tier and files, beside the steps, in threads of its own."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError
from farsight.core.messages.kv import BlockName, KVIdentity
from farsight.core.request import Residency
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.devices.copiers import KVCopier
from farsight.engine.kv_files import KVFiles, drop_unused, open_folder, weights_checksum
from farsight.engine.kv_pool import KVPool
from farsight.engine.native.library import compiled_name, processor
from farsight.engine.native.model import NativeBackend
from farsight.engine.runner import Device
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import BlockManager, KVCopy
from farsight.kvcache.tiers import KVTiers, TierLimits

logger = logging.getLogger(__name__)

_AT_ONCE = 8
"""Blocks that are read before they are written to the pool: as much memory as a return takes beside it."""


class TierStore(KVCopier):
    """Carries out the orders of ``KVTiers``, and those between the two pools. All but ``look`` belongs to one thread.

    Blocks of the host tier are bytes in this process's memory; ``KVTiers`` says which.

    Args:
        pool, host: As of ``KVCopier``.
        files: The disk tier.
        blocks: The pool's, which say what was evicted.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        pool: KVPool,
        host: KVPool | None,
        tiers: KVTiers,
        files: KVFiles,
        blocks: BlockManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(pool, host)
        self._pool, self._tiers, self._files, self._blocks, self._clock = pool, tiers, files, blocks, clock
        self._rows: dict[int, Tensor] = {}  # the host tier, by name
        self._take = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-keep")
        self._down = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-save")
        self._up = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-return")
        self._found: deque[list[BlockName]] = deque()
        self._has_failed = False

    def look(self, names: Sequence[int], tenant: str) -> None:
        if names and self._tiers.tier_of(names[-1]) is None:
            self._found.append(self._files.find(names, tenant))
        first = next((i for i, name in enumerate(names) if not self._blocks.caches(name)), len(names))
        if first < len(names):  # it may wait for its step; until then the system reads
            self._up.submit(self._files.read_ahead, names, tenant, first)

    def take_done(self) -> list[tuple[int, bool]]:
        self._drop()
        self._tiers.tick(self._clock())
        while self._found:
            found = self._found.popleft()
            self._tiers.learn([block for block in reversed(found) if block.name not in self._tiers.disk])
        return super().take_done()

    def begin(self, copy: KVCopy) -> None:
        self._drop()
        if not copy.names:
            super().begin(copy)
        elif copy.to is Residency.DEVICE:
            self.submit(copy.copy_id, self._up, lambda: self._bring_back(copy))
        elif copy.to is Residency.HOST:
            self.submit(copy.copy_id, self._take, lambda: self._hold(copy))
        else:
            rows = [] if copy.source else [self._rows[each.name] for each in copy.names]  # which may leave meanwhile
            self.submit(copy.copy_id, self._down, lambda: self._write(copy, rows))

    def _drop(self) -> None:
        """Deletes what left a tier, before what is ordered after it."""
        for tier, block in self._tiers.take_dropped():
            if tier is Residency.HOST:
                self._rows.pop(block.name, None)
            else:
                self._down.submit(self._files.remove, block)

    @torch.inference_mode()
    def _read_pool(self, copy: KVCopy) -> Iterator[tuple[BlockName, Tensor]]:
        """Yields blocks of the pool that were not evicted before they were read; the next one overwrites a row."""
        rows = torch.empty(min(_AT_ONCE, len(copy.source)), *self._pool.block_shape, dtype=self._pool.dtype)
        for first in range(0, len(copy.source), len(rows)):
            blocks, names = copy.source[first : first + len(rows)], copy.names[first : first + len(rows)]
            self._pool.read_blocks(blocks, rows[: len(blocks)])
            intact = [self._blocks.has_read(block, each.name) for block, each in zip(blocks, names, strict=True)]
            yield from itertools.compress(zip(names, rows, strict=False), intact)

    def _hold(self, copy: KVCopy) -> None:
        for block, row in self._read_pool(copy):
            self._rows[block.name] = row.clone()

    def _write(self, copy: KVCopy, held: list[Tensor]) -> None:
        """Writes blocks of the host tier or the pool to files, unless the disk is full or the folder is gone."""
        num_written = 0
        rows = zip(copy.names, held, strict=True) if held else self._read_pool(copy)
        try:
            for block, row in rows:
                self._files.write(block, _bytes_of(row))
                num_written = copy.names.index(block, num_written) + 1
        except OSError as error:
            if not self._has_failed:
                logger.warning("blocks cannot be written to engine.disk_kv: %s", error)
            self._has_failed = True
            self._tiers.outcomes[copy.copy_id] = num_written, None
        else:
            self._has_failed = False

    @torch.inference_mode()
    def _bring_back(self, copy: KVCopy) -> None:
        """Reads blocks, checks them and writes them to the pool, up to the first that is not as it was."""
        num_good, num_blocks, began_at = 0, len(copy.names), self._clock()
        rows = torch.empty(min(_AT_ONCE, num_blocks), *self._pool.block_shape, dtype=self._pool.dtype)
        while num_good < num_blocks:
            part = copy.names[num_good : num_good + len(rows)]
            num_read = 0
            for block, row in zip(part, rows, strict=False):
                if not self._read(block, row):
                    break
                num_read += 1
            if num_read:
                self._pool.write_blocks(copy.target[num_good : num_good + num_read], rows[:num_read])
            num_good += num_read
            if num_read < len(part):
                break
        self._tiers.outcomes[copy.copy_id] = num_good, self._clock() - began_at

    def _read(self, block: BlockName, row: Tensor) -> bool:
        held = self._rows.get(block.name)
        if held is not None:
            row.copy_(held)
            return True
        return self._files.read(block, _bytes_of(row))


def _bytes_of(row: Tensor) -> memoryview:
    return memoryview(row.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def open_tiers(
    model_dir: Path,
    config: DecoderConfig,
    engine: EngineConfig,
    device: Device,
    weights: str,
    host_bytes: int,
    blocks: BlockManager,
) -> tuple[KVTiers, TierStore]:
    """Opens the tiers below a device's pool, with what earlier processes have left on the disk.

    Args:
        weights: How the matrices are rounded, as ``engine.weights`` says where it is not ``auto``.
        host_bytes: Memory of the host tier; 0 for none.
        blocks: The device's pool.

    Raises:
        ConfigError: The folder cannot be used, or a bound is below a block.
    """
    assert isinstance(device.runner, ModelRunner), "no other runner has a pool"
    folder, pool = open_folder(Path(engine.disk_kv)), device.runner.pool
    size = device.token_bytes * engine.kv_block_size
    identity = KVIdentity(
        model=f"{config.architecture} {pool.block_shape} context {device.context_len} factors {engine.long_factors}",
        weights=weights_checksum(model_dir, folder),
        dtype=str(pool.dtype),
        rounding=f"{weights} {engine.kv_dtype}",
        build=_build(device.runner),
        block_size=engine.kv_block_size,
        block_bytes=size,
    )
    most = engine.disk_bytes("disk_kv_bytes")
    if most < size:
        raise ConfigError("engine.disk_kv_bytes", engine.disk_kv_bytes, f"room for at least one block of {size} bytes")
    drop_unused(folder, most)
    files = KVFiles(folder, identity)
    limits = TierLimits(
        host_blocks=host_bytes // size,
        disk_blocks=most // size,
        owner_blocks=engine.disk_bytes("disk_kv_tenant_bytes") // size,
        block_bytes=size,
        write_bytes_per_hour=engine.disk_bytes("disk_kv_hourly_bytes"),
    )
    tiers = KVTiers(limits)
    tiers.learn(files.blocks())
    host = device.copier.host if isinstance(device.copier, KVCopier) else None
    store = TierStore(pool, host, tiers, files, blocks)
    logger.info("%d blocks of KV from earlier requests are in %s", len(tiers.disk), folder)
    return tiers, store


def _build(runner: ModelRunner) -> str:
    """Returns what decides, beside the weights, which bits a step computes."""
    backend, sources = runner.backend, hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        sources.update(path.read_bytes())
    code = compiled_name() if isinstance(backend, NativeBackend) else f"torch {torch.__version__}"
    return f"{type(backend).__name__} {code} {sources.hexdigest()} {processor()}"
