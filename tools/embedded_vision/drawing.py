"""Draws scenes as pictures: each shape and digit at a random place of its cell, with random size, turn and shade."""

from __future__ import annotations

import functools
import math
import random
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tools.embedded_vision.scenes import GRID, Cell, Scene, Shape

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

# Strokes of the digits in a box one wide and one high, as polylines.
STROKES: Final[dict[str, tuple[tuple[Point, ...], ...]]] = {
    "0": (((0.5, 0), (0.85, 0.18), (0.9, 0.5), (0.85, 0.82), (0.5, 1), (0.15, 0.82), (0.1, 0.5), (0.15, 0.18), (0.5, 0)),),
    "1": (((0.2, 0.25), (0.55, 0), (0.55, 1)),),
    "2": (((0.12, 0.22), (0.3, 0.02), (0.7, 0.02), (0.88, 0.25), (0.75, 0.5), (0.1, 1), (0.9, 1)),),
    "3": (((0.12, 0.1), (0.5, 0), (0.85, 0.2), (0.75, 0.42), (0.45, 0.48), (0.8, 0.58), (0.88, 0.8), (0.5, 1), (0.1, 0.88)),),
    "4": (((0.7, 1), (0.7, 0), (0.08, 0.68), (0.95, 0.68)),),
    "5": (((0.85, 0), (0.2, 0), (0.15, 0.45), (0.55, 0.38), (0.88, 0.6), (0.8, 0.9), (0.45, 1), (0.1, 0.9)),),
    "6": (((0.8, 0.05), (0.4, 0.15), (0.12, 0.6), (0.25, 0.95), (0.65, 1), (0.88, 0.75), (0.7, 0.5), (0.3, 0.52), (0.14, 0.7)),),
    "7": (((0.1, 0), (0.9, 0), (0.4, 1)),),
    "8": (
        ((0.5, 0.47), (0.18, 0.28), (0.3, 0.03), (0.7, 0.03), (0.82, 0.28), (0.5, 0.47), (0.12, 0.72), (0.28, 0.98), (0.72, 0.98), (0.88, 0.72), (0.5, 0.47)),
    ),
    "9": (((0.86, 0.3), (0.7, 0.5), (0.3, 0.5), (0.12, 0.25), (0.35, 0), (0.75, 0.05), (0.88, 0.4), (0.6, 0.85), (0.2, 0.95)),),
}  # fmt: skip


def draw(scene: Scene, rng: random.Random) -> np.ndarray:
    """The picture of a scene, uint8 ``[SIDE, SIDE, 3]``."""
    ground = rng.randint(212, 250)
    picture = Image.new("RGB", (SIDE, SIDE), _near((ground,) * 3, 5, rng))
    pen = ImageDraw.Draw(picture)
    ink = tuple(rng.randint(0, 100) for _ in range(3))
    printed = rng.random() < 0.3
    for index, cell in enumerate(scene.cells):
        row, column = divmod(index, GRID)
        _draw_cell(pen, cell, (column * CELL, row * CELL), ink, printed, rng)
    noisy = np.asarray(picture, np.float32) + _noise(rng) * np.float32(rng.random() * NOISE)
    return np.clip(noisy + 0.5, 0, 255).astype(np.uint8)


def _noise(rng: random.Random) -> np.ndarray:
    """Standard normal ``[SIDE, SIDE, 3]``, cut out of a longer row: drawing it anew costs more than all shapes."""
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
