"""Picture files of a thousand seeds: cut, changed, mislabelled, huge, thin, animated, turned, and well."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

from tests.unit.engine.vision.picture_files import ORIENTATION, animation, bomb, file_of, png_of, text_bomb

Draw = np.random.Generator
KINDS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")

_TEXTS = (
    b"hello",
    b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    b"<html><script>alert(1)</script></html>",
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    b"PK\x03\x04" + bytes(60),
    b"\x7fELF" + bytes(60),
    b"%PDF-1.7\n" + bytes(60),
    b"push graphic-context\nviewbox 0 0 9 9\nimage over 0,0 0,0 'https://127.0.0.1/'\npop graphic-context",
)
_MAGIC = (
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff\xe0",
    b"GIF89a",
    b"RIFF\xff\xff\xff\xffWEBP",
    b"BM",
    b"II*\0",
    b"\0\0\1\0",
)


def coarse(draw: Draw, width: int, height: int, channels: int = 3) -> np.ndarray:
    """uint8 ``[height, width, channels]`` of some 6 x 6 colours: what resizing makes of noise is grey."""
    colours = draw.integers(0, 256, (6, 6, channels), dtype=np.uint8)
    rows, columns = np.arange(height) * 6 // height, np.arange(width) * 6 // width
    return colours[rows][:, columns]


def picture(draw: Draw, channels: int = 3) -> Image.Image:
    width, height = draw.integers(8, 200, 2)
    return Image.fromarray(coarse(draw, width, height, channels))


def kind(draw: Draw) -> str:
    return KINDS[draw.integers(len(KINDS))]


def well(draw: Draw) -> bytes:
    return file_of(picture(draw), kind(draw))


def cut(draw: Draw) -> bytes:
    data = well(draw)
    return data[: draw.integers(0, len(data))]


def changed(draw: Draw) -> bytes:
    data = bytearray(well(draw))
    for at in draw.integers(0, len(data), draw.integers(1, 9)):
        data[at] = draw.integers(0, 256)
    return bytes(data)


def mislabelled(draw: Draw) -> bytes:
    if draw.integers(2):
        return _TEXTS[draw.integers(len(_TEXTS))]
    return file_of(picture(draw), ("TIFF", "PPM", "ICO", "TGA", "PCX")[draw.integers(5)])


def garbage(draw: Draw) -> bytes:
    return _MAGIC[draw.integers(len(_MAGIC))] + draw.bytes(int(draw.integers(0, 4000)))


def huge_claim(draw: Draw) -> bytes:
    """A few bytes that say that they are many pixels."""
    width, height = (int(each) for each in draw.integers(20_000, 65_000, 2))
    gif = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    gif += b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\2\2D\1\0;"
    bmp = b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, *[0] * 6)
    jpeg = bytearray(file_of(picture(draw), "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", height, width)
    canvas = (16_382).to_bytes(3, "little") * 2
    frames = b"WEBPVP8X" + struct.pack("<I", 10) + bytes([2, 0, 0, 0]) + canvas
    webp = b"RIFF" + struct.pack("<I", len(frames)) + frames
    png = png_of(width, height, zlib.compress(bytes(100)))
    return (gif, bmp, bytes(jpeg), webp, png)[draw.integers(5)]


def large_bomb(draw: Draw) -> bytes:
    return bomb(6000, 5600 + int(draw.integers(100)))


def small_bomb(draw: Draw) -> bytes:
    """One that is allowed: 9 million pixels in some 10 KiB."""
    return bomb(3000, 3000 + int(draw.integers(100)))


def hidden_bomb(draw: Draw) -> bytes:
    return text_bomb() + draw.bytes(4)


def animated(draw: Draw) -> bytes:
    return animation(("GIF", "WEBP", "PNG", "MPO")[draw.integers(4)], seed=int(draw.integers(1 << 20)))


def cmyk(draw: Draw) -> bytes:
    return file_of(picture(draw).convert("CMYK"), "JPEG")


def dot(draw: Draw) -> bytes:
    return file_of(Image.fromarray(coarse(draw, 1, 1)), kind(draw))


def turned(draw: Draw) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = int(draw.integers(0, 10))
    return file_of(picture(draw), ("JPEG", "PNG", "WEBP")[draw.integers(3)], exif=exif)


def clear(draw: Draw) -> bytes:
    """With transparency: in a palette, or a channel."""
    if draw.integers(2):
        return file_of(picture(draw, 4), ("PNG", "WEBP")[draw.integers(2)])
    return file_of(picture(draw).quantize(16), "PNG", transparency=draw.bytes(16))


def deep(draw: Draw) -> bytes:
    return file_of(Image.fromarray(coarse(draw, 60, 40)[:, :, 0].astype(np.uint16) * 257), "PNG")


def thin(draw: Draw) -> bytes:
    return file_of(Image.fromarray(coarse(draw, int(draw.integers(300, 3000)), int(draw.integers(1, 8)))), "PNG")


def wrong_rows(draw: Draw) -> bytes:
    return png_of(40, 30, zlib.compress(draw.bytes(30 * 41))[: draw.integers(2, 600)])


def photo(draw: Draw) -> bytes:
    return file_of(Image.fromarray(coarse(draw, 1600, 1200)), "JPEG", progressive=bool(draw.integers(2)))


MAKERS: tuple[Callable[[Draw], bytes], ...] = (
    *(well, cut, changed, mislabelled, garbage, huge_claim, large_bomb, small_bomb, hidden_bomb, animated),
    *(cmyk, dot, turned, clear, deep, thin, wrong_rows, photo, cut, changed),
)


def hostile_picture(number: int) -> tuple[str, bytes]:
    """Its kind and its file; one of the kinds after the other."""
    make = MAKERS[number % len(MAKERS)]
    return make.__name__, make(np.random.default_rng((28, number)))
