"""Reads picture files in a child: ``python -m farsight.engine.vision.decoder_process PIXELS SIDE CPU_S BYTES SOCKET``.

See ``engine.vision.decoder``. Imports Pillow and nothing of a model.
"""

from __future__ import annotations

import codecs
import os
import struct
import sys
import warnings
from importlib import import_module
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from farsight.core.child_process import LENGTH, limit_process, parent_stream, processor_time, receive

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
"""What Pillow may take a file for. TIFF is none of them: it is a family of formats, most of them read by libraries that
hostile files are seldom tried on. ``TiffImagePlugin`` is here since EXIF data has its form."""

_PLUGINS = ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "Tiff", "WebP")
_LATER = ("copy", "mmap", "colorsys", "PIL.ImageColor", "PIL.ImagePalette", "PIL.ImageFilter")
_ENCODINGS = ("ascii", "latin-1", "utf-8", "utf-16", "utf-16-le", "utf-16-be")
"""What Pillow imports while it reads; the process opens no file later."""

READ, REFUSED = b"P", b"R"
"""What an answer begins with: then a width, a height and bytes of red, green and blue; or the two parts of an error."""

SIZE = struct.Struct(">II")
PICTURE = 1 + SIZE.size
"""Where the pixels of an answer begin."""

_MAX_REASON = 200
"""Characters of Pillow's own words that a client is told."""


class _Refused(Exception):
    """What was found, and what would be right."""

    def __init__(self, value: str, expected: str) -> None:
        super().__init__(value, expected)
        self.parts = value, expected


def read_picture(data: bytes, max_pixels: int, max_side: int) -> Image.Image:
    """Returns the picture in ``RGB``.

    Raises:
        Exception: It cannot be read; a decoder raises what it likes for a damaged file.
    """
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        found = f"a file of {len(data)} bytes that begins with {data[:8].hex(' ')}"
        raise _Refused(found, f"a picture of one of the formats {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > max_pixels or max(width, height) > max_side:
        found = f"a {image.format} of {width} x {height} pixels"
        raise _Refused(found, f"at most {max_pixels} pixels, and {max_side} on a side")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except MemoryError:
        raise
    except Exception as error:
        found = f"a {image.format} of {width} x {height} pixels: {_reason(error)}"
        raise _Refused(found, "a file that is whole and undamaged") from error


def _reason(error: Exception) -> str:
    """Returns Pillow's own words; the system's name paths of this machine."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_MAX_REASON]


def answered(data: bytes, max_pixels: int, max_side: int) -> tuple[bytes, bytes]:
    """Returns the beginning of an answer, and its pixels."""
    try:
        image = read_picture(data, max_pixels, max_side)
        return READ + SIZE.pack(*image.size), image.tobytes()
    except _Refused as error:
        return _refusal(*error.parts)
    except MemoryError:
        return _refusal(f"a file of {len(data)} bytes that needs too much memory", "a smaller or simpler picture")
    except Exception as error:  # a file is a program for its decoder
        return _refusal(f"a file of {len(data)} bytes: {_reason(error)}", "a file that is whole and undamaged")


def _refusal(value: str, expected: str) -> tuple[bytes, bytes]:
    return REFUSED + f"{value}\n{expected}".encode(errors="replace"), b""


def main() -> None:
    """Reads one file after the other until the other end closes."""
    pixels, side, cpu_s, memory = sys.argv[1:5]
    max_pixels, max_side = int(pixels), int(side)
    Image.preinit()
    for name in (*(f"PIL.{name}ImagePlugin" for name in _PLUGINS), *_LATER):
        import_module(name)
    for name in _ENCODINGS:
        codecs.lookup(name)
    Image.MAX_IMAGE_PIXELS = None  # checked above, with the size in the error
    warnings.simplefilter("ignore")  # a client could fill the log
    with parent_stream() as stream:
        limit_process(int(memory), opens_files=False)
        while (data := receive(stream)) is not None:
            with processor_time(float(cpu_s)):
                head, picture = answered(data, max_pixels, max_side)
            stream.write(LENGTH.pack(len(head) + len(picture)))
            stream.write(head)
            stream.write(picture)
            stream.flush()
            del data, picture  # before the next is received


if __name__ == "__main__":
    main()
