"""Draws scenes as pictures: each shape and digit at a random place of its cell, with random size, turn and shade."""

from __future__ import annotations

import functools
import math
import random
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lab.embedded_vision.scenes import GRID, Cell, Scene, Shape

CELL: Final = 32
"""Pixels of a cell's side. The model sees half of that: its processor shrinks pictures."""
SIDE: Final = CELL * GRID
SHADES: Final = {"red": (215, 45, 45), "green": (45, 160, 65), "blue": (45, 85, 215), "yellow": (235, 195, 35)}
SHADE_SPREAD: Final = 18
SHAPE_SIDES: Final = (17, 28)
DIGIT_SIDES: Final = (22, 29)
TURN: Final = 12
"""Degrees that squares and triangles are turned by at most."""
NOISE: Final = 9.0
"""Largest standard deviation of a pixel's noise, of 255."""

Point = tuple[float, float]


def _polylines(text: str) -> tuple[tuple[Point, ...], ...]:
    """The lines in ``x,y x,y ...`` in percent of a box; a semicolon lifts the pen."""
    return tuple(
        tuple((int(x) / 100, int(y) / 100) for x, y in (point.split(",") for point in stroke.split()))
        for stroke in text.split(";")
    )


STROKES: Final = {
    "0": _polylines("50,0 85,18 90,50 85,82 50,100 15,82 10,50 15,18 50,0"),
    "1": _polylines("20,25 55,0 55,100"),
    "2": _polylines("12,22 30,2 70,2 88,25 75,50 10,100 90,100"),
    "3": _polylines("12,10 50,0 85,20 75,42 45,48 80,58 88,80 50,100 10,88"),
    "4": _polylines("70,100 70,0 8,68 95,68"),
    "5": _polylines("85,0 20,0 15,45 55,38 88,60 80,90 45,100 10,90"),
    "6": _polylines("80,5 40,15 12,60 25,95 65,100 88,75 70,50 30,52 14,70"),
    "7": _polylines("10,0 90,0 40,100"),
    "8": _polylines("50,47 18,28 30,3 70,3 82,28 50,47 12,72 28,98 72,98 88,72 50,47"),
    "9": _polylines("86,30 70,50 30,50 12,25 35,0 75,5 88,40 60,85 20,95"),
}
"""Strokes of the digits in a box one wide and one high."""


def draw(scene: Scene, rng: random.Random, noise: float = NOISE) -> np.ndarray:
    """The picture of a scene, uint8 ``[SIDE, SIDE, 3]``.

    Args:
        noise: Largest standard deviation of a pixel's noise, of 255.
    """
    ground = rng.randint(212, 250)
    picture = Image.new("RGB", (SIDE, SIDE), _near((ground,) * 3, 5, rng))
    pen = ImageDraw.Draw(picture)
    ink = tuple(rng.randint(0, 100) for _ in range(3))
    printed = rng.random() < 0.3
    for index, cell in enumerate(scene.cells):
        row, column = divmod(index, GRID)
        _draw_cell(pen, cell, (column * CELL, row * CELL), ink, printed, rng)
    noisy = np.asarray(picture, np.float32) + _noise(rng) * np.float32(rng.random() * noise)
    return np.clip(noisy + 0.5, 0, 255).astype(np.uint8)


def _noise(rng: random.Random) -> np.ndarray:
    """Standard normal ``[SIDE, SIDE, 3]``, cut out of a longer row: to draw it each time costs more than all shapes."""
    row = _noise_row()
    start = rng.randrange(len(row) - SIDE * SIDE * 3)
    return row[start : start + SIDE * SIDE * 3].reshape(SIDE, SIDE, 3)


@functools.cache
def _noise_row() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1 << 21, np.float32)


def _draw_cell(
    pen: ImageDraw.ImageDraw,
    cell: Cell,
    corner: tuple[int, int],
    ink: tuple[int, ...],
    printed: bool,
    rng: random.Random,
) -> None:
    if isinstance(cell, Shape):
        _draw_shape(pen, cell, corner, rng)
    elif cell is not None:
        (_print_digit if printed else _stroke_digit)(pen, cell, corner, ink, rng)


def _draw_shape(pen: ImageDraw.ImageDraw, shape: Shape, corner: tuple[int, int], rng: random.Random) -> None:
    fill = _near(SHADES[shape.colour], SHADE_SPREAD, rng)
    size = rng.uniform(*SHAPE_SIDES)
    half = size / 2
    x, y = (each + rng.uniform(half + 1, CELL - half - 1) for each in corner)
    if shape.kind == "circle":
        pen.ellipse((x - half, y - half, x + half, y + half), fill=fill)
        return
    outline = [(-half, half), (half, half), (0.0, -half)]
    if shape.kind == "square":
        side = half * 0.9  # as much paint as a circle of this size, about
        outline = [(-side, -side), (side, -side), (side, side), (-side, side)]
    turn = math.radians(rng.uniform(-TURN, TURN))
    cos, sin = math.cos(turn), math.sin(turn)
    pen.polygon([(x + dx * cos - dy * sin, y + dx * sin + dy * cos) for dx, dy in outline], fill=fill)


def _stroke_digit(
    pen: ImageDraw.ImageDraw, digit: str, corner: tuple[int, int], ink: tuple[int, ...], rng: random.Random
) -> None:
    height = rng.uniform(*DIGIT_SIDES) - 3
    width = height * rng.uniform(0.5, 0.75)
    slant = rng.uniform(-0.15, 0.15)
    left = corner[0] + 2 + rng.uniform(0, CELL - width - 4)
    top = corner[1] + 2 + rng.uniform(0, CELL - height - 4)
    for stroke in STROKES[digit]:
        points = [
            (left + width * (x + slant * (0.5 - y) + rng.gauss(0, 0.03)), top + height * (y + rng.gauss(0, 0.03)))
            for x, y in stroke
        ]
        pen.line(points, fill=ink, width=rng.randint(2, 5), joint="curve")


def _print_digit(
    pen: ImageDraw.ImageDraw, digit: str, corner: tuple[int, int], ink: tuple[int, ...], rng: random.Random
) -> None:
    x, y = (each + CELL / 2 + rng.uniform(-4, 4) for each in corner)
    pen.text((x, y), digit, fill=ink, font=_font(rng.randint(*DIGIT_SIDES)), anchor="mm")


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _near(colour: tuple[int, ...], spread: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(min(255, max(0, each + rng.randint(-spread, spread))) for each in colour)
