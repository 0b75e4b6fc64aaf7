"""What the pictures of the embedded vision model show: shapes or a number on a grid of cells.

A scene is content alone; :mod:`.drawing` chooses sizes, places in the cell, shades and noise. The content decides
whether a scene is for training, for choosing a checkpoint, or for the reported figures, so no scene of one is
ever drawn for another.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

GRID: Final = 4
"""Cells of a side."""
CELLS: Final = GRID * GRID
KINDS: Final = ("circle", "square", "triangle")
COLOURS: Final = ("red", "green", "blue", "yellow")
MAX_SHAPES: Final = 4
MAX_DIGITS: Final = GRID

Part = Literal["training", "validation", "held_out"]
_PARTS: Final[tuple[Part, ...]] = ("held_out", "validation", *(("training",) * 6))


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of a picture."""

    kind: str
    colour: str


Cell = Shape | str | None
"""A shape, a digit, or nothing."""


@dataclass(frozen=True, slots=True)
class Scene:
    """``CELLS`` cells, row by row from the top left."""

    cells: tuple[Cell, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """In the order of reading."""
        return tuple(cell for cell in self.cells if isinstance(cell, Shape))

    @property
    def number(self) -> str:
        """Its digits; empty for a scene of shapes."""
        return "".join(cell for cell in self.cells if isinstance(cell, str))

    @property
    def part(self) -> Part:
        """Which use the scene is for: one in eight each for validation and for the reported figures."""
        return _PARTS[zlib.crc32(repr(self.cells).encode()) % len(_PARTS)]


def shapes_scene(rng: random.Random) -> Scene:
    """One to ``MAX_SHAPES`` shapes in cells drawn at random, kinds and colours in random shares."""
    kinds = _shares(rng, len(KINDS))
    colours = _shares(rng, len(COLOURS))
    cells: list[Cell] = [None] * CELLS
    for cell in rng.sample(range(CELLS), rng.randint(1, MAX_SHAPES)):
        cells[cell] = Shape(rng.choices(KINDS, kinds)[0], rng.choices(COLOURS, colours)[0])
    return Scene(tuple(cells))


def number_scene(rng: random.Random) -> Scene:
    """A number of one to ``MAX_DIGITS`` digits in the cells of one row, from the left."""
    digits = rng.randint(1, MAX_DIGITS)
    start = rng.randrange(GRID) * GRID
    cells: list[Cell] = [None] * CELLS
    for cell in range(start, start + digits):
        cells[cell] = str(rng.randrange(10))
    return Scene(tuple(cells))


def full_scene(rng: random.Random) -> Scene:
    """Shapes and digits in nearly every cell: no question is about such a picture, but the tower learns from it."""
    cells: list[Cell] = []
    for _ in range(CELLS):
        kind = rng.random()
        if kind < 0.45:
            cells.append(str(rng.randrange(10)))
        else:
            cells.append(Shape(rng.choice(KINDS), rng.choice(COLOURS)) if kind < 0.9 else None)
    return Scene(tuple(cells))


def scenes(make: Callable[[random.Random], Scene], part: Part, rng: random.Random) -> Iterator[Scene]:
    """Scenes of one part, without end."""
    while True:
        scene = make(rng)
        if scene.part == part:
            yield scene


def _shares(rng: random.Random, count: int) -> list[float]:
    return [rng.expovariate(1) + 0.05 for _ in range(count)]
