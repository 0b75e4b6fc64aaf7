"""Questions about scenes, and their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tools.embedded_vision.scenes import COLOURS, KINDS, Scene, number_scene, shapes_scene


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a scene, with its answer."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question.

    Attributes:
        make: Draws a scene that the question can be asked about.
        ask: Draws a question about a scene.
    """

    make: Callable[[random.Random], Scene]
    ask: Callable[[Scene, random.Random], Question]


def _count_kind(scene: Scene, rng: random.Random) -> Question:
    kind = rng.choice(KINDS)
    count = sum(shape.kind == kind for shape in scene.shapes)
    return Question(rng.choice(("How many {}s?", "Count the {}s.")).format(kind), str(count))


def _count_colour(scene: Scene, rng: random.Random) -> Question:
    colour = rng.choice(COLOURS)
    count = sum(shape.colour == colour for shape in scene.shapes)
    return Question(f"How many {colour} shapes?", str(count))


def _count_all(scene: Scene, rng: random.Random) -> Question:
    return Question(rng.choice(("How many shapes?", "Count the shapes.")), str(len(scene.shapes)))


def _is_there(scene: Scene, rng: random.Random) -> Question:
    colour, kind = rng.choice(COLOURS), rng.choice(KINDS)
    if rng.random() < 0.4:  # otherwise few answers are yes
        shape = rng.choice(scene.shapes)
        colour, kind = shape.colour, shape.kind
    found = any(shape.colour == colour and shape.kind == kind for shape in scene.shapes)
    return Question(f"Is there a {colour} {kind}?", "yes" if found else "no")


def _each_kind(scene: Scene, rng: random.Random) -> Question:
    counts = [sum(shape.kind == kind for shape in scene.shapes) for kind in KINDS]
    return Question("Count each kind.", ", ".join(f"{n} {kind}s" for n, kind in zip(counts, KINDS, strict=True)))


def _each_colour(scene: Scene, rng: random.Random) -> Question:
    counts = [sum(shape.colour == colour for shape in scene.shapes) for colour in COLOURS]
    return Question("Count each colour.", ", ".join(f"{n} {each}" for n, each in zip(counts, COLOURS, strict=True)))


def _read(scene: Scene, rng: random.Random) -> Question:
    return Question(rng.choice(("Read the number.", "What number is it?")), scene.number)


TASKS: Final[Mapping[str, Task]] = {
    "count_kind": Task(shapes_scene, _count_kind),
    "count_colour": Task(shapes_scene, _count_colour),
    "count_all": Task(shapes_scene, _count_all),
    "is_there": Task(shapes_scene, _is_there),
    "each_kind": Task(shapes_scene, _each_kind),
    "each_colour": Task(shapes_scene, _each_colour),
    "read": Task(number_scene, _read),
}
