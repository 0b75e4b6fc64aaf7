"""Reads picture files in processes of their own, which may be ended.

A picture's file is a program for its decoder, by anyone: it may claim to hold 4 billion pixels, take minutes in one
call of a library in C, or find a defect in that library. So a child reads it (``decoder_process``): the kernel ends the
child after ``DecodeLimits.cpu_s`` of processor time for one file and bounds its memory; it opens and writes no file,
has no socket but the one to its parent, and its environment holds no keys. The next file gets a new child.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from farsight.core.child_process import ChildLost, ChildStopped, LimitedChild
from farsight.core.errors import FarsightError, InvalidValueError
from farsight.engine.vision.decoder_process import PICTURE, READ, SIZE

_MODULE = "farsight.engine.vision.decoder_process"

_TRIES = 2
"""A child that something else has ended, or that got no processor time, takes no file with it: the file is read once
more."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What one file may cost.

    Attributes:
        max_bytes: Bytes of the file.
        max_pixels: Pixels of the picture, which its header says before anything is decoded. The default is a little
            more than one of 8K (7680 x 4320).
        max_side: Pixels of its longer side.
        cpu_s: Seconds of processor time.
        memory_bytes: Memory of the child beside what it has before it knows the file; 0 is 32 bytes for each of
            ``max_pixels``: a decoder holds a picture some five times, at 4 bytes a pixel.
    """

    max_bytes: int = 32 << 20
    max_pixels: int = 1 << 25
    max_side: int = 1 << 15
    cpu_s: float = 10.0
    memory_bytes: int = 0


class PictureDecoder:
    """Turns files into pixels, as ``transformers.image_utils.load_image`` does: turned as EXIF says, the first frame.

    May be used by any number of threads. An event loop awaits ``asyncio.wrap_future(decoder.submit(data))``.

    Args:
        limits: What each file may cost.
        num_processes: Files that are read at the same time; each process starts when it is needed, and stays.
    """

    def __init__(self, limits: DecodeLimits | None = None, num_processes: int = 1) -> None:
        self.limits = limits or DecodeLimits()
        self._threads = ThreadPoolExecutor(num_processes, "picture-decoder")
        self._free: queue.LifoQueue[LimitedChild | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._free.put(None)
        self._closed = threading.Event()

    def submit(self, data: bytes) -> Future[np.ndarray]:
        """Decodes in a thread of its own (``decode``)."""
        return self._threads.submit(self.decode, data)

    def decode(self, data: bytes) -> np.ndarray:
        """Decodes a file to uint8 ``[height, width, 3]``, read-only. Blocks, within ``ANSWER_S`` at each try.

        Raises:
            InvalidValueError: No picture, a damaged one, one of another format, or one beyond the limits.
            FarsightError: Both tries ended through no fault of the file.
        """
        if not 1 <= len(data) <= self.limits.max_bytes:
            raise InvalidValueError("image", f"a file of {len(data)} bytes", f"1 to {self.limits.max_bytes} bytes")
        child = self._free.get()
        try:
            lost = ChildLost()
            for _ in range(_TRIES):
                if child is None or child.has_ended:
                    child = self._started()
                try:
                    return _pixels(child.ask(data))
                except ChildLost as error:
                    lost = error
                except ChildStopped as error:
                    raise InvalidValueError("image", _described(data), f"one that can be read: {error}") from error
            raise FarsightError(f"the picture could not be read: {lost}") from lost
        finally:
            if self._closed.is_set() and child is not None:
                child.end()
            self._free.put(child)

    def close(self) -> None:
        """Ends all processes; files that wait are not read."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        held = []
        while not self._free.empty():
            held.append(self._free.get_nowait())
        for child in held:
            if child is not None:
                child.end()
            self._free.put(child)

    def _started(self) -> LimitedChild:
        limits = self.limits
        numbers = (limits.max_pixels, limits.max_side, limits.cpu_s, limits.memory_bytes or 32 * limits.max_pixels)
        return LimitedChild(_MODULE, *map(str, numbers), cpu_s=limits.cpu_s)


def _pixels(reply: bytes) -> np.ndarray:
    if reply[:1] != READ:
        value, expected = reply[1:].decode().split("\n", 1)
        raise InvalidValueError("image", value, expected)
    width, height = SIZE.unpack_from(reply, 1)
    return np.frombuffer(reply, np.uint8, offset=PICTURE).reshape(height, width, 3)


def _described(data: bytes) -> str:
    return f"a file of {len(data)} bytes that begins with {data[:8].hex(' ')}"
