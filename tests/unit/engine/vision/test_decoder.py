"""Picture files from anyone: read as transformers reads them, or refused with a reason, by a child that is bounded."""

from __future__ import annotations

import functools
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import cast

import numpy as np
import psutil
import pytest
from PIL import Image
from transformers.image_utils import load_image

from farsight.core.errors import FarsightError, InvalidValueError
from farsight.engine.vision.decoder import DecodeLimits, PictureDecoder
from tests.unit.engine.vision.picture_files import bomb, file_of, noise, picture_file, png_of, text_bomb, unusual

UNUSUAL = unusual()
pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow warns of many of these files when this process reads them


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    decoder = PictureDecoder()
    yield decoder
    decoder.close()


def child_of(decoder: PictureDecoder) -> psutil.Process:
    """The process that has read a file and waits for the next."""
    child = decoder._free.get()
    decoder._free.put(child)
    assert child is not None
    return psutil.Process(child.pid)


@pytest.mark.parametrize("name", UNUSUAL)
def test_files_are_read_as_transformers_reads_them(name: str, decoder: PictureDecoder) -> None:
    with Image.open(BytesIO(UNUSUAL[name])) as image:
        expected = np.asarray(load_image(image))
    found = decoder.decode(UNUSUAL[name])
    assert found.dtype == np.uint8 and found.shape == expected.shape
    assert np.array_equal(found, expected)


def _damaged() -> dict[str, tuple[bytes | Callable[[], bytes], str]]:
    """Files, or what makes a large one, and what the error says."""
    png, jpeg = picture_file(40, 30), picture_file(40, 30, "JPEG")
    gif, webp, bmp = picture_file(40, 30, "GIF"), picture_file(40, 30, "WEBP"), picture_file(40, 30, "BMP")
    return {
        "nothing": (b"", "1 to 33554432 bytes"),
        "one byte": (b"\x89", "one of the formats PNG, JPEG, GIF, WEBP, BMP"),
        "text": (b"hello", "begins with 68 65 6c 6c 6f"),
        "a page": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "one of the formats"),
        "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "one of the formats"),
        "TIFF": (picture_file(40, 30, "TIFF"), "one of the formats"),
        "PPM": (picture_file(40, 30, "PPM"), "one of the formats"),
        "a PNG's head": (png[:20], "whole and undamaged"),
        "a cut PNG": (png[:-600], "PNG of 40 x 30 pixels"),
        "a cut JPEG": (jpeg[:-200], "JPEG of 40 x 30 pixels"),
        "a cut GIF": (gif[:-400], "GIF of 40 x 30 pixels"),
        "a cut WebP": (webp[:-40], "image"),
        "a cut BMP": (bmp[:-400], "BMP of 40 x 30 pixels"),
        "wrong rows": (png_of(40, 30, b"no zlib"), "PNG of 40 x 30 pixels"),
        "no pixels": (png_of(0, 0, zlib.compress(b"")), "image"),
        "a huge size": (png_of(2**31 - 1, 2**31 - 1, zlib.compress(bytes(9))), "at most 33554432 pixels"),
        "a thin picture": (png_of(40_000, 1, zlib.compress(bytes(40_001))), "32768 on a side"),
        "a bomb": (functools.partial(bomb, 20_000, 20_000), "a PNG of 20000 x 20000 pixels"),
        "a bomb of text": (text_bomb(), "image"),
        "a large WebP": (_large_webp, "image"),
    }


def _large_webp() -> bytes:
    """A WebP animation that claims the largest canvas there is."""
    canvas = (16383).to_bytes(3, "little") * 2
    head = b"VP8X" + (10).to_bytes(4, "little") + bytes([2, 0, 0, 0]) + canvas
    body = b"WEBP" + head + b"ANIM" + (6).to_bytes(4, "little") + bytes(6)
    return b"RIFF" + len(body).to_bytes(4, "little") + body


DAMAGED = _damaged()


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_with_a_reason_and_the_next_is_read(name: str, decoder: PictureDecoder) -> None:
    data, reason = DAMAGED[name]
    data = data() if callable(data) else data
    with pytest.raises(InvalidValueError, match=reason) as caught:
        decoder.decode(data)
    assert caught.value.field == "image"
    assert "0x" not in str(caught.value), "addresses of this process"
    assert decoder.decode(picture_file(1, 1)).shape == (1, 1, 3)


def test_what_is_damaged_does_not_end_the_child(decoder: PictureDecoder) -> None:
    """One process reads them all: only what takes too much time costs a new one."""
    decoder.decode(picture_file(1, 1))
    before = child_of(decoder)
    for name in ("text", "a cut JPEG", "a huge size", "a bomb of text", "wrong rows"):
        with pytest.raises(InvalidValueError):
            decoder.decode(cast(bytes, DAMAGED[name][0]))
    assert child_of(decoder) == before


def test_random_changes_of_bytes_are_read_or_refused(decoder: PictureDecoder) -> None:
    """What is read is what Pillow reads without a child."""
    rng = np.random.default_rng(7)
    files = list(UNUSUAL.values())
    outcomes = set()
    for number in range(120):
        data = bytearray(files[number % len(files)])
        for at in rng.integers(0, len(data), rng.integers(1, 12)):
            data[at] = rng.integers(0, 256)
        try:
            found = decoder.decode(bytes(data))
        except InvalidValueError:
            outcomes.add("refused")
            continue
        outcomes.add("read")
        with Image.open(BytesIO(data)) as image:
            assert np.array_equal(found, np.asarray(load_image(image)))
    assert outcomes == {"read", "refused"}


def test_a_file_that_takes_too_much_time_is_stopped() -> None:
    decoder = PictureDecoder(DecodeLimits(cpu_s=0.02))
    slow = file_of(Image.fromarray(noise(3200, 3200)), "PNG", compress_level=1)
    with pytest.raises(InvalidValueError, match=r"stopped after 0\.02 s of processor time"):
        decoder.decode(slow)
    assert decoder.decode(picture_file(1, 1)).shape == (1, 1, 3)
    decoder.close()


def test_a_file_that_takes_too_much_memory_is_refused() -> None:
    decoder = PictureDecoder(DecodeLimits(memory_bytes=48 << 20))
    with pytest.raises(InvalidValueError, match="too much memory"):
        decoder.decode(bomb(5000, 5000))
    assert decoder.decode(picture_file(1, 1)).shape == (1, 1, 3)
    decoder.close()


def test_a_child_that_something_else_has_ended_costs_no_file(decoder: PictureDecoder) -> None:
    expected = decoder.decode(picture_file(30, 20))
    for _ in range(2):
        child = child_of(decoder)
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        assert np.array_equal(decoder.decode(picture_file(30, 20)), expected)


def test_a_child_that_gets_no_processor_time_costs_no_file(decoder: PictureDecoder) -> None:
    expected = decoder.decode(picture_file(30, 20))
    child = decoder._free.get()
    assert child is not None
    child._socket.settimeout(0.2)
    decoder._free.put(child)
    os.kill(child.pid, signal.SIGSTOP)
    assert np.array_equal(decoder.decode(picture_file(30, 20)), expected)
    assert child.has_ended


def test_a_machine_without_processor_time_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farsight.core.child_process.ANSWER_S", 0.001)  # no interpreter starts in it
    decoder = PictureDecoder()
    with pytest.raises(FarsightError, match=r"could not be read: its process did not answer") as raised:
        decoder.decode(picture_file(1, 1))
    assert not isinstance(raised.value, InvalidValueError)
    decoder.close()


def test_the_child_has_no_secrets_and_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSIGHT_API_KEY", "a secret of some length")
    decoder = PictureDecoder()
    decoder.decode(picture_file(1, 1))
    child = child_of(decoder)
    assert "FARSIGHT_API_KEY" not in child.environ()
    limits = {
        name: child.rlimit(number)[1]
        for name, number in (
            ("files", psutil.RLIMIT_NOFILE),
            ("bytes of a file", psutil.RLIMIT_FSIZE),
            ("core", psutil.RLIMIT_CORE),
        )
    }
    assert limits == {"files": 0, "bytes of a file": 0, "core": 0}
    assert child.rlimit(psutil.RLIMIT_AS)[1] < 32 * DecodeLimits().max_pixels + (1 << 30)
    decoder.close()
    child.wait(60)


def test_many_files_at_once_each_get_their_own_answer() -> None:
    decoder = PictureDecoder(num_processes=2)
    sizes = [(1 + number % 7, 1 + number % 5) for number in range(40)]
    futures = [decoder.submit(picture_file(*size, seed=number)) for number, size in enumerate(sizes)]
    for number, (size, future) in enumerate(zip(sizes, futures, strict=True)):
        assert np.array_equal(future.result(120), noise(*size, seed=number))
    children = [decoder._free.get() for _ in range(2)]
    for child in children:
        decoder._free.put(child)
    decoder.close()
    assert all(child is None or child.has_ended for child in children)


def test_a_decoder_that_is_closed_while_it_reads_leaves_no_process() -> None:
    decoder = PictureDecoder()
    decoder.decode(picture_file(1, 1))
    child = child_of(decoder)
    os.kill(child.pid, signal.SIGSTOP)
    future = decoder.submit(picture_file(30, 20))
    while decoder._free.qsize():
        threading.Event().wait(0.01)
    decoder.close()
    os.kill(child.pid, signal.SIGCONT)
    assert future.result(60).shape == (20, 30, 3)
    child.wait(60)


def test_memory_is_flat_over_many_large_files(decoder: PictureDecoder) -> None:
    data, small = bomb(3000, 3000), bomb(30, 30)

    def held() -> int:
        decoder.decode(small)  # the child has let go of the picture before by the time that it answers for this one
        return int(child_of(decoder).memory_info().rss)

    for _ in range(3):
        decoder.decode(data)
    before = held()
    for _ in range(12):
        decoder.decode(data)
    assert held() - before < 20 << 20, "one picture is 27 MB of RGB"
