"""Questions about scenes, and their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lab.embedded_vision.scenes import KINDS, Scene, number_scene, shapes_scene


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


def _count_all(scene: Scene, rng: random.Random) -> Question:
    return Question(rng.choice(("How many shapes?", "Count the shapes.")), str(len(scene.shapes)))


def _each_kind(scene: Scene, rng: random.Random) -> Question:
    counts = [sum(shape.kind == kind for shape in scene.shapes) for kind in KINDS]
    return Question("Count each kind.", ", ".join(f"{n} {kind}s" for n, kind in zip(counts, KINDS, strict=True)))


def _read(scene: Scene, rng: random.Random) -> Question:
    return Question(rng.choice(("Read the number.", "What number is it?")), scene.number)


TASKS: Final[Mapping[str, Task]] = {
    "count_kind": Task(shapes_scene, _count_kind),
    "count_all": Task(shapes_scene, _count_all),
    "each_kind": Task(shapes_scene, _each_kind),
    "read": Task(number_scene, _read),
}
