"""Pictures that the embedded vision model is trained on and asked about: shapes in colours, and numbers.

A picture follows from its content and a random generator. A CRC-32 of the content decides whether it is for training
or held out (one in eight is): a held-out number, or a held-out set of shapes, is in no picture of the training.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image, ImageDraw

SIDE: Final = 96
"""Pixels of a picture's side."""

KINDS: Final = ("circle", "square", "triangle")
COLOURS: Final = {"red": (214, 40, 40), "green": (30, 150, 60), "blue": (40, 70, 210), "black": (20, 20, 20)}
CELLS: Final = 4
"""Cells of a picture's side; a shape lies in one."""
MAX_SHAPES: Final = 6
MAX_NUMBER: Final = 999
HELD_OUT_SHARE: Final = 8

_GLYPHS: Final = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""The ten digits, five dots wide and seven high."""
_DOT: Final = 4
"""Pixels of a dot's side."""
_ADVANCE: Final = 6 * _DOT


@dataclass(frozen=True, slots=True)
class Mark:
    """What is to be seen at one place.

    Attributes:
        x, y: Its middle, in pixels.
        label: A number below ``NUM_LABELS``: a shape of a kind and colour, or a digit.
    """

    x: float
    y: float
    label: int


NUM_LABELS: Final = len(KINDS) * len(COLOURS) + 10


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture with what may be asked about it.

    Attributes:
        rgb: uint8 ``[SIDE, SIDE, 3]``.
        questions: Each with its answer.
    """

    rgb: np.ndarray
    marks: tuple[Mark, ...]
    questions: tuple[tuple[str, str], ...]


def is_held_out(content: str) -> bool:
    """Whether a picture of this content is never trained on."""
    return zlib.crc32(content.encode()) % HELD_OUT_SHARE == 0


def draw(rng: random.Random, *, held_out: bool, numbers: bool) -> Drawing:
    """A random picture of a number, or of shapes."""
    return _draw_number(rng, held_out=held_out) if numbers else _draw_shapes(rng, held_out=held_out)


def _draw_shapes(rng: random.Random, *, held_out: bool) -> Drawing:
    while True:
        count = rng.randrange(MAX_SHAPES + 1)
        shapes = [(rng.choice(KINDS), rng.choice(list(COLOURS))) for _ in range(count)]
        content = "shapes " + " ".join(sorted(f"{colour} {kind}" for kind, colour in shapes))
        # The empty picture and pictures of one shape are few: all of them are trained on.
        if count < 2 and not held_out:
            break
        if count >= 2 and is_held_out(content) == held_out:
            break
    image, pen = _canvas(rng)
    size = SIDE / CELLS
    marks = []
    for (kind, colour), cell in zip(shapes, rng.sample(range(CELLS * CELLS), count), strict=True):
        radius = rng.uniform(7.0, 10.5)
        free = size / 2 - radius
        x = (cell % CELLS + 0.5) * size + rng.uniform(-free, free)
        y = (cell // CELLS + 0.5) * size + rng.uniform(-free, free)
        _shape(pen, kind, COLOURS[colour], x, y, radius)
        marks.append(Mark(x, y, KINDS.index(kind) * len(COLOURS) + list(COLOURS).index(colour)))
    return Drawing(np.asarray(image), tuple(marks), tuple(_shape_questions(rng, shapes)))


def _shape_questions(rng: random.Random, shapes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """In random order; each of them also the first one now and then."""
    asked = [(f"How many {kind}s?", str(sum(each == kind for each, _ in shapes))) for kind in KINDS]
    asked.append(("How many shapes?", str(len(shapes))))
    for kind in KINDS:
        colours = [colour for each, colour in shapes if each == kind]
        if len(colours) == 1:
            asked.append((f"What colour is the {kind}?", colours[0]))
    rng.shuffle(asked)
    return asked


def _draw_number(rng: random.Random, *, held_out: bool) -> Drawing:
    while True:
        digits = rng.choice((1, 2, 3, 3))
        number = str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
        if is_held_out(f"number {number}") == held_out:
            break
    image, pen = _canvas(rng)
    colour = COLOURS[rng.choice(list(COLOURS))]
    wide, high = _ADVANCE * digits - _DOT, 7 * _DOT
    left, top = rng.uniform(2, SIDE - wide - 2), rng.uniform(2, SIDE - high - 2)
    marks = []
    for place, digit in enumerate(number):
        x = left + place * _ADVANCE
        for row, dots in enumerate(_GLYPHS[int(digit)].split()):
            for column, dot in enumerate(dots):
                if dot == "1":
                    corner = x + column * _DOT, top + row * _DOT
                    pen.rectangle((*corner, corner[0] + _DOT - 0.01, corner[1] + _DOT - 0.01), fill=colour)
        label = len(KINDS) * len(COLOURS) + int(digit)
        marks.append(Mark(x + 2.5 * _DOT, top + 3.5 * _DOT, label))
    return Drawing(np.asarray(image), tuple(marks), (("Read the number.", number),))


def _canvas(rng: random.Random) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    paper = rng.randrange(225, 256)
    image = Image.new("RGB", (SIDE, SIDE), (paper, paper, paper))
    return image, ImageDraw.Draw(image)


def _shape(pen: ImageDraw.ImageDraw, kind: str, colour: tuple[int, int, int], x: float, y: float, r: float) -> None:
    if kind == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif kind == "square":
        side = r * 0.88
        pen.rectangle((x - side, y - side, x + side, y + side), fill=colour)
    else:
        pen.polygon(((x, y - r), (x - r, y + 0.8 * r), (x + r, y + 0.8 * r)), fill=colour)
