"""Train the embedded vision model from scratch on one CPU core.

    python -m lab.embedded_vision.train --out services/embedded_vision --checkpoints build/embedded_vision

Three stages, each of which writes its weights to a folder, from where an interrupted run goes on with the next stage:

1. ``cells``: tower and projector learn what each cell of a picture holds (:mod:`.tower`).
2. ``counts``: they learn to count over the whole picture.
3. ``answers``: the text model learns to answer (:mod:`.answers`).

The last stage keeps the weights that answer most questions about validation pictures. The figures that are reported
come from ``python -m lab.embedded_vision.evaluate``, on pictures that neither training nor this choice has seen.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import LlavaForConditionalGeneration

from lab.embedded_vision.answers import Batch, TrainingPictures, answer_loss, check_batches, margin, right_answers
from lab.embedded_vision.drawing import draw
from lab.embedded_vision.model import build_model, export
from lab.embedded_vision.scenes import Scene, scenes, shapes_scene
from lab.embedded_vision.tower import CELLS_STAGE, COUNTS_STAGE, build_optimizer, set_rate, train_tower
from lab.embedded_vision.words import TASKS, Question

SEED: Final = 1
CELLS_STEPS: Final = 450
COUNTS_STEPS: Final = 350
ANSWERS_STEPS: Final = 500
SHAPES_BATCH: Final = 20
NUMBERS_BATCH: Final = 32
SHAPES_SHARE: Final = 0.6
"""Weight of pictures of shapes in the loss."""
TOWER_RATE: Final = 5e-4
PROJECTOR_RATE: Final = 5e-4
TEXT_RATE: Final = 2e-3
"""Peak rates of the last stage."""
CHECK_EVERY: Final = 50
CHECKED: Final = 100
"""Validation pictures a task."""
EXAMPLES: Final = 100
"""Pictures of which one becomes the example."""


def train_answers(model: LlavaForConditionalGeneration, best: Path, steps: int, seed: int) -> None:
    """The last stage: ``model`` gets the weights that do best on validation pictures, which are also at ``best``."""
    torch.manual_seed(seed)
    optimizer = build_optimizer(
        [
            ([model.model.vision_tower], TOWER_RATE),
            ([model.model.multi_modal_projector], PROJECTOR_RATE),
            ([model.model.language_model], TEXT_RATE),
        ]
    )
    pictures = TrainingPictures(seed)
    checks = check_batches("validation", CHECKED, seed)
    most = -1
    started = time.monotonic()
    for step in range(steps):
        set_rate(optimizer, step, steps)
        shapes = answer_loss(model, pictures.shapes(SHAPES_BATCH))
        (shapes * SHAPES_SHARE).backward()
        numbers = answer_loss(model, pictures.numbers(NUMBERS_BATCH))
        (numbers * (1 - SHAPES_SHARE)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            right = _right_of(model, checks)
            seconds = time.monotonic() - started
            print(f"answers {step + 1} {seconds:.0f}s {shapes.item():.3f} {numbers.item():.3f} {right}", flush=True)
            if sum(right.values()) >= most:
                most = sum(right.values())
                torch.save(model.state_dict(), best)
    model.load_state_dict(torch.load(best, weights_only=True))


def _right_of(model: LlavaForConditionalGeneration, checks: Mapping[str, Batch]) -> dict[str, int]:
    return {name: sum(map(sum, right_answers(model, batch))) for name, batch in checks.items()}


def write_example(model: LlavaForConditionalGeneration, out: Path, seed: int) -> Question:
    """Writes the picture that the server shows in its first request, and returns the question with its answer.

    The model is surest of this one's right answer among ``EXAMPLES`` held-out pictures: the example must not fail. Each
    shows two kinds of shapes, twice each, since the model writes plurals alone. Without noise and in few colours it has
    some hundred bytes.
    """
    rng = random.Random(seed)
    chosen: tuple[float, Image.Image, Question] | None = None
    source = filter(_two_and_two, scenes(shapes_scene, "held_out", rng))
    for scene in itertools.islice(source, EXAMPLES):
        shown = Image.fromarray(draw(scene, rng, noise=0)).quantize(32)
        question = TASKS["each_kind"].ask(scene, rng)
        found = margin(model, np.asarray(shown.convert("RGB")), question)
        if chosen is None or found > chosen[0]:
            chosen = found, shown, question
    assert chosen is not None
    chosen[1].save(out / "example.png", optimize=True)
    return chosen[2]


def _two_and_two(scene: Scene) -> bool:
    return sorted(Counter(shape.kind for shape in scene.shapes).values()) == [2, 2]


def train(out: Path, checkpoints: Path, seed: int) -> None:
    """All stages that are not done yet, then the model's files."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = build_model()
    for stage, steps in ((CELLS_STAGE, CELLS_STEPS), (COUNTS_STAGE, COUNTS_STEPS)):
        path = checkpoints / f"{stage.name}.pt"
        if not path.exists():
            train_tower(model, stage, steps, seed)
            torch.save(model.state_dict(), path)
        model.load_state_dict(torch.load(path, weights_only=True))
    train_answers(model, checkpoints / "answers.pt", ANSWERS_STEPS, seed)
    export(model, out)
    write_example(model, out, seed)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the embedded vision model from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model's files")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/embedded_vision"), help="weights of each stage")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.out, arguments.checkpoints, arguments.seed)


if __name__ == "__main__":
    main()
