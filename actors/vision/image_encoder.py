"""ImageEncoder: decodes pictures and turns them into the rows that workers read in place of placeholder tokens.

Nothing here may import torch at the top: Ray imports this module in every process that gets a handle of the actor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from farsight.actors.calls.scheduling import ImageEncoderCalls
from farsight.actors.pulse import read_clock
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import family
from farsight.actors.runtime.peer import again_and_again
from farsight.actors.runtime.shared_rows import rows_directory
from farsight.actors.vision.encoding_cost import TERMS, EncodingCost
from farsight.core.errors import ConfigError, FarsightError, InvalidValueError
from farsight.core.images import EncodedImage, EncodedImages, EncodeImages, ImageFile
from farsight.core.messages.status import Work
from farsight.core.processors import encoder_threads, return_large_blocks
from farsight.engine.devices.emulated import EmulatedVision, emulate_vision
from farsight.engine.vision.decoder import DecodeLimits, PictureDecoder
from farsight.engine.vision.row_files import RowStore, rows_name

if TYPE_CHECKING:
    from farsight.core.config.load import FarsightConfig
    from farsight.engine.vision.geometry import PreparedImage
    from farsight.engine.vision.model import VisionModel


logger = logging.getLogger(__name__)


class CarriedRows:
    """Rows in the memory of this process, by the names that ``rows_name`` makes; each answer carries them.

    Has the interface of ``RowStore``.

    Args:
        max_bytes: Most bytes of all rows; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, EncodedImage] = OrderedDict()
        self.num_bytes = 0

    def find(self, name: str) -> EncodedImage | None:
        """Returns the rows of a picture, and marks them as most recently used."""
        found = self._kept.get(name)
        if found is not None:
            self._kept.move_to_end(name)
        return found

    def keep(self, name: str, image: EncodedImage) -> EncodedImage:
        """Keeps the rows of a picture, in place of others; no rows larger than the whole cache."""
        size = len(image.embeddings)
        if name not in self._kept and size <= self._max_bytes:
            self._kept[name] = image
            self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= len(dropped.embeddings)
        return image

    def sweep(self, now: float) -> None:
        """Does nothing: no rows outlive their process."""


MAX_BATCH = 16
"""Most pictures that are decoded and not yet encoded, and so the largest batch."""

MAX_DECODED = 2
"""Most pictures in memory at full size: one is resized while the next is decoded."""

SWEEP_S = 60.0
"""Seconds between two searches for rows that dead processes have held."""

_NICE = 5
"""Niceness: steps of workers go first where processors are few."""

_MIB = 1 << 20
_BATCHES = (1.0, 2.0, 4.0, 8.0, float(MAX_BATCH))
_TIMES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A prepared picture and the future of its rows."""

    prepared: PreparedImage
    rows: asyncio.Future[bytes]


class ImageEncoder(Component, ImageEncoderCalls):
    """Keeps no state that must survive: a caller whose encoder has died asks again."""

    kind = "ImageEncoder"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        self._settings = context.config.images
        registry = context.registry
        text = "Pictures of requests: encoded, cached (encoded before), or refused."
        self._images = family(registry, Counter, "farsight:images", text, ("outcome",))
        text = "Pictures encoded together."
        self._batches = family(registry, Histogram, "farsight:image_batch_size", text, buckets=_BATCHES)
        text = "Time of encoding them."
        self._times = family(registry, Histogram, "farsight:image_batch_seconds", text, buckets=_TIMES_S)
        self._kept = family(registry, Gauge, "farsight:image_cache_bytes", "Rows that are kept.")
        text = "Fitted seconds of a batch of pictures, of each of its tokens, and of each pair of tokens of a picture."
        self._costs = family(registry, Gauge, "farsight:image_cost_seconds", text, ("encoder", "term"))
        self._cache = _cache(self._settings.cache_mib * _MIB, context.name)
        self._thread = ThreadPoolExecutor(1, "tower")
        self._preparing = ThreadPoolExecutor(1, "pixels")
        self._decoder = PictureDecoder(DecodeLimits(max_pixels=self._settings.max_pixels))
        self._built: asyncio.Future[VisionModel | EmulatedVision] = asyncio.get_running_loop().create_future()
        self._open: dict[str, asyncio.Future[EncodedImage]] = {}
        self._room = asyncio.Semaphore(MAX_BATCH)
        self._decoding = asyncio.Semaphore(MAX_DECODED)
        self._prepared: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._encoded_at: float | None = None
        self._cost = EncodingCost(context.config.actors.step_stall_s)
        self._under_way: tuple[int, ...] = ()  # tokens of the pictures of the batch
        self._num_batches = 0
        self._thread_id = 0

    async def start(self) -> None:
        """Loads the tower.

        Raises:
            InvalidValueError: The model, its directory or a setting cannot be used.
        """
        if "ray" in sys.modules and sys.modules["ray"].is_initialized():  # without Ray the process does more than this
            with suppress(OSError):
                os.nice(_NICE)
            return_large_blocks()
        model_dir = Path(self.context.site.model_dir)
        loop = asyncio.get_running_loop()
        self._thread_id = await loop.run_in_executor(self._thread, threading.get_native_id)
        self._built.set_result(await loop.run_in_executor(self._thread, _load, model_dir, self.context.config))
        self.spawn(self._run())
        self.spawn(again_and_again(self._sweep, SWEEP_S))

    async def stop(self) -> None:
        await super().stop()
        self._thread.shutdown(wait=False)
        self._preparing.shutdown(wait=False)
        self._decoder.close()

    @property
    def state(self) -> str:
        return "ready" if self._built.done() else "starting"

    @property
    def queue(self) -> int:
        return len(self._open)

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._encoded_at is None else time.monotonic() - self._encoded_at

    @property
    def work(self) -> Work | None:
        if not self._under_way:
            return None
        clock = read_clock(os.getpid(), self._thread_id)
        return Work(self.name, self._num_batches, self._cost.bound_s(self._under_way), clock)

    async def encode(self, order: EncodeImages) -> EncodedImages:
        return EncodedImages(tuple(await asyncio.gather(*(self._one(file, order.salt) for file in order.files))))

    async def _one(self, file: ImageFile, salt: str) -> EncodedImage:
        """Returns a picture's rows from the cache, or from another caller's encoding under way, or encodes it."""
        name = rows_name(file.digest, salt)
        found = self._cache.find(name)
        if found is None and name in self._open:
            found = await asyncio.shield(self._open[name])
        if found is not None:
            self._images.labels("refused" if found.problem else "cached").inc()
            return dataclasses.replace(found, digest=file.digest, is_cached=True)
        task = asyncio.create_task(self._fresh(file, name))
        self._open[name] = task
        task.add_done_callback(functools.partial(self._done, name))
        # A caller that leaves does not end the task: another may wait for the same picture.
        return await asyncio.shield(task)

    def _done(self, name: str, task: asyncio.Future[EncodedImage]) -> None:
        del self._open[name]
        if not task.cancelled() and task.exception() is None:
            self._images.labels("refused" if task.result().problem else "encoded").inc()
            self._kept.set(self._cache.num_bytes)

    async def _fresh(self, file: ImageFile, name: str) -> EncodedImage:
        async with self._room:
            try:
                prepared = await self._decoded(file)
            except InvalidValueError as error:
                return EncodedImage(file.digest, problem=error.expected, found=str(error.value))
            waiting = _Waiting(prepared, asyncio.get_running_loop().create_future())
            self._prepared.put_nowait(waiting)
            embeddings = await waiting.rows
        return self._cache.keep(name, EncodedImage(file.digest, prepared.num_tokens, prepared.grid, embeddings))

    async def _decoded(self, file: ImageFile) -> PreparedImage:
        vision = await asyncio.shield(self._built)
        async with self._decoding:
            rgb = await asyncio.wrap_future(self._decoder.submit(file.data))
            return await asyncio.get_running_loop().run_in_executor(self._preparing, vision.geometry.prepare, rgb)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await asyncio.to_thread(self._cache.sweep, time.time())

    async def _run(self) -> None:
        """Encodes the waiting pictures together; never returns."""
        while True:
            batch = [await self._prepared.get()]
            while not self._prepared.empty():
                batch.append(self._prepared.get_nowait())
            self._under_way = tuple(each.prepared.num_tokens for each in batch)
            self._num_batches += 1
            began = time.monotonic()
            try:
                rows = await self._encoded([each.prepared for each in batch])
            except Exception as error:
                logger.exception("%d pictures could not be encoded", len(batch))
                for each in batch:
                    each.rows.set_exception(FarsightError(f"the picture could not be encoded: {error}"))
                continue
            finally:
                tokens, self._under_way = self._under_way, ()
            for each, found in zip(batch, rows, strict=True):
                each.rows.set_result(found)
            self._measured(tokens, began)

    def _measured(self, tokens: tuple[int, ...], began: float) -> None:
        self._encoded_at = time.monotonic()
        seconds = self._encoded_at - began
        self._cost.add(tokens, seconds)
        self._batches.observe(len(tokens))
        self._times.observe(seconds)
        for term, value_s in zip(TERMS, self._cost.coefficients(), strict=True):
            self._costs.labels(self.name, term).set(value_s)

    async def _encoded(self, images: Sequence[PreparedImage]) -> list[bytes]:
        vision = self._built.result()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: [vision.packed(rows) for rows in vision.encode(images)])


def _cache(max_bytes: int, owner: str) -> CarriedRows | RowStore:
    directory = rows_directory()
    return CarriedRows(max_bytes) if directory is None else RowStore(directory, max_bytes, owner)


def _load(model_dir: Path, config: FarsightConfig) -> VisionModel | EmulatedVision:
    """Loads the tower, in the thread that will run it. An emulated device needs no torch."""
    vision: VisionModel | EmulatedVision | None
    if config.engine.profile:
        vision = emulate_vision(model_dir, config.engine.profile)
    else:
        vision = _load_tower(model_dir, config)
    if vision is None:
        raise ConfigError("model.path", str(model_dir), "a model that sees")
    return vision


def _load_tower(model_dir: Path, config: FarsightConfig) -> VisionModel | None:
    import torch

    from farsight.engine.checkpoint.dtypes import parse_dtype
    from farsight.engine.checkpoint.model_config import load_model_config
    from farsight.engine.vision.model import load_vision

    torch.set_num_threads(encoder_threads(config.images.num_threads))
    dtype = parse_dtype(config.model.dtype, load_model_config(model_dir), config.images.device)
    return load_vision(model_dir, dtype, config.images.device)
