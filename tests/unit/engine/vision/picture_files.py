"""Picture files for tests, well and hostile, each from a seed or from nothing."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

ORIENTATION = 0x0112
"""EXIF: how a picture is turned."""


def noise(width: int, height: int, *, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 ``[height, width, channels]``."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def picture_file(width: int, height: int, kind: str = "PNG", *, seed: int = 0) -> bytes:
    return file_of(Image.fromarray(noise(width, height, seed=seed)), kind)


def animation(kind: str, *, seed: int = 0) -> bytes:
    frames = [Image.fromarray(noise(20, 14, seed=seed + number)) for number in range(3)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=40)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(width: int, height: int, rows: bytes) -> bytes:
    """A grey PNG that claims a size, whatever its compressed rows hold."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bomb(width: int, height: int) -> bytes:
    """A few kilobytes that hold a black picture of that size, all rows of it."""
    packer = zlib.compressobj(9)
    row, parts = bytes(width + 1), list[bytes]()
    parts.extend(packer.compress(row) for _ in range(height))
    return png_of(width, height, b"".join(parts) + packer.flush())


def text_bomb() -> bytes:
    """A small picture with a compressed text of 16 MiB beside it."""
    packer = zlib.compressobj(9)
    piece = bytes(1 << 20)
    data = b"".join(packer.compress(piece) for _ in range(16)) + packer.flush()
    whole = png_of(2, 2, zlib.compress(bytes(6)))
    at = whole.index(b"IDAT") - 4
    return whole[:at] + chunk(b"zTXt", b"Comment\0\0" + data) + whole[at:]


def turned(angle: int) -> bytes:
    """A JPEG whose EXIF data says that it is turned or mirrored; 1 to 8."""
    exif = Image.Exif()
    exif[ORIENTATION] = angle
    return file_of(Image.fromarray(noise(23, 9)), "JPEG", exif=exif)


def unusual() -> dict[str, bytes]:
    """Files that are well, of many kinds."""
    colour, grey = Image.fromarray(noise(21, 13)), Image.fromarray(noise(21, 13)[:, :, 0])
    clear = Image.fromarray(noise(21, 13, channels=4))
    deep = Image.fromarray(np.random.default_rng(1).integers(0, 1 << 16, (13, 21), dtype=np.uint16))
    palette = colour.quantize(16)
    return {
        "1 x 1": picture_file(1, 1),
        "1 x 1 GIF": file_of(Image.new("P", (1, 1)), "GIF"),
        "JPEG": picture_file(21, 13, "JPEG"),
        "progressive JPEG": file_of(colour, "JPEG", progressive=True),
        "grey JPEG": file_of(grey, "JPEG"),
        "CMYK": file_of(colour.convert("CMYK"), "JPEG"),
        "WebP": picture_file(21, 13, "WEBP"),
        "WebP with transparency": file_of(clear, "WEBP", lossless=True),
        "BMP": picture_file(21, 13, "BMP"),
        "GIF": picture_file(21, 13, "GIF"),
        "RGBA": file_of(clear, "PNG"),
        "grey with transparency": file_of(clear.convert("LA"), "PNG"),
        "black and white": file_of(grey.convert("1"), "PNG"),
        "16 bits": file_of(deep, "PNG"),
        "palette": file_of(palette, "PNG"),
        "palette with one clear colour": file_of(palette, "PNG", transparency=3),
        "palette with transparency": file_of(palette, "PNG", transparency=bytes(range(0, 256, 16))),
        "animated GIF": animation("GIF"),
        "animated WebP": animation("WEBP"),
        "animated PNG": animation("PNG"),
        "several JPEGs": animation("MPO"),
        **{f"EXIF {angle}": turned(angle) for angle in range(1, 9)},
    }
