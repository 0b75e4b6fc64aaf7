"""First stages of the training: the tower and the projector learn what each cell holds, then to count.

Linear layers on the projector's rows name the content of their cells, and count the shapes of the whole picture; they
are dropped afterwards. Every picture gives many answers this way, where a question gives one, so that the tower sees
well after few pictures.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlavaForConditionalGeneration

from lab.embedded_vision.drawing import draw
from lab.embedded_vision.model import pixels_of
from lab.embedded_vision.scenes import (
    COLOURS,
    KINDS,
    MAX_SHAPES,
    Cell,
    Part,
    Scene,
    Shape,
    full_scene,
    number_scene,
    scenes,
    shapes_scene,
)

WARM_UP_STEPS: Final = 40
FINAL_SHARE: Final = 0.03
"""Share of the peak rate at the end."""
WEIGHT_DECAY: Final = 0.05


def build_optimizer(parts: Sequence[tuple[Sequence[nn.Module], float]]) -> torch.optim.AdamW:
    """AdamW over modules, each group with its peak rate; weight decay on the matrices alone."""
    groups: list[dict[str, Any]] = []
    for modules, peak in parts:
        parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
        matrices, vectors = ([p for p in parameters if (p.ndim > 1) is wide] for wide in (True, False))
        groups.append({"params": matrices, "weight_decay": WEIGHT_DECAY, "peak": peak, "lr": 0.0})
        groups.append({"params": vectors, "weight_decay": 0.0, "peak": peak, "lr": 0.0})
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def set_rate(optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Linear warm-up, then a cosine down to ``FINAL_SHARE`` of each group's peak."""
    warm_up = min(WARM_UP_STEPS, steps // 10)
    if step < warm_up:
        share = (step + 1) / warm_up
    else:
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        share = FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done))
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share


Maker = Callable[[random.Random], Scene]

CONTENTS: Final[tuple[Cell, ...]] = (
    None,
    *(Shape(kind, colour) for kind in KINDS for colour in COLOURS),
    *(str(digit) for digit in range(10)),
)
"""What a cell can hold."""
COUNTED: Final = (*KINDS, *COLOURS, "")
"""What is counted: shapes of a kind, of a colour, and all."""
BATCH: Final = 64
EMPTY_WEIGHT: Final = 0.2
"""Weight of an empty cell in the loss: most are empty, and they are learned at once."""


@dataclass(frozen=True, slots=True)
class TowerStage:
    """One stage.

    Attributes:
        name: What its pictures are seeded with.
        makers: What makes the scenes, by turns.
        peak: The optimiser's peak rate.
        counts: Each row also learns how many shapes of each kind and colour the whole picture has.
    """

    name: str
    makers: tuple[Maker, ...]
    peak: float
    counts: bool


CELLS_STAGE: Final = TowerStage("tower", (full_scene, full_scene, shapes_scene, number_scene), 2e-3, counts=False)
COUNTS_STAGE: Final = TowerStage("counts", (shapes_scene, shapes_scene, shapes_scene, number_scene), 2e-3, counts=True)


@dataclass(frozen=True, slots=True)
class Labelled:
    """Pictures ``[n, 3, side, side]``, their cells' contents ``[n, PATCHES]``, their counts ``[n, len(COUNTED)]``."""

    pixels: Tensor
    contents: Tensor
    counts: Tensor


class _Heads(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.contents = nn.Linear(hidden, len(CONTENTS))
        self.counts = nn.Linear(hidden, len(COUNTED) * (MAX_SHAPES + 1))

    def counted(self, rows: Tensor) -> Tensor:
        """``[n, PATCHES, len(COUNTED), MAX_SHAPES + 1]``."""
        logits: Tensor = self.counts(rows)
        return logits.unflatten(-1, (len(COUNTED), MAX_SHAPES + 1))


def rows_of(model: LlavaForConditionalGeneration, pixels: Tensor) -> Tensor:
    """The projector's rows, ``[n, PATCHES, hidden]``."""
    return torch.stack(list(model.model.get_image_features(pixel_values=pixels).pooler_output))


def labelled_pictures(part: Part, seed: str, makers: Sequence[Maker]) -> Iterator[Labelled]:
    """Batches of pictures, without end."""
    rng = random.Random(seed)
    sources = [scenes(make, part, rng) for make in makers]
    numbers = {content: index for index, content in enumerate(CONTENTS)}
    while True:
        drawn = [next(sources[index % len(sources)]) for index in range(BATCH)]
        contents = torch.tensor([[numbers[cell] for cell in scene.cells] for scene in drawn])
        counts = torch.tensor([_counts(scene) for scene in drawn])
        yield Labelled(pixels_of([draw(scene, rng) for scene in drawn]), contents, counts)


def _counts(scene: Scene) -> list[int]:
    found = [sum(name in (shape.kind, shape.colour, "") for shape in scene.shapes) for name in COUNTED]
    return [min(count, MAX_SHAPES) for count in found]


def train_tower(model: LlavaForConditionalGeneration, stage: TowerStage, steps: int, seed: int) -> None:
    """Trains tower and projector in place; the text model is not run."""
    torch.manual_seed(seed)
    width: Any = model.get_input_embeddings().embedding_dim
    heads = _Heads(width)
    parts = [model.model.vision_tower, model.model.multi_modal_projector, heads]
    optimizer = build_optimizer([(parts, stage.peak)])
    batches = labelled_pictures("training", f"{stage.name}/{seed}", stage.makers)
    checks = [next(labelled_pictures("validation", f"check/{seed}", (make,))) for make in (shapes_scene, number_scene)]
    started = time.monotonic()
    for step in range(steps):
        set_rate(optimizer, step, steps)
        loss = _loss(model, heads, next(batches), stage)
        loss.backward()
        nn.utils.clip_grad_norm_([each for part in parts for each in part.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49 or step + 1 == steps:
            right = ", ".join(f"{share:.3f}" for check in checks for share in _right(model, heads, check))
            seconds = time.monotonic() - started
            print(f"{stage.name} {step + 1} {seconds:.0f}s loss {loss.item():.4f} right {right}", flush=True)


def _loss(model: LlavaForConditionalGeneration, heads: _Heads, batch: Labelled, stage: TowerStage) -> Tensor:
    rows = rows_of(model, batch.pixels)
    weights = torch.ones(len(CONTENTS))
    weights[0] = EMPTY_WEIGHT
    loss = functional.cross_entropy(heads.contents(rows).flatten(0, 1), batch.contents.flatten(), weight=weights)
    if stage.counts:
        logits = heads.counted(rows)
        wanted = batch.counts[:, None, :].expand(logits.shape[:3])
        loss = loss + functional.cross_entropy(logits.flatten(0, 2), wanted.flatten())
    return loss


@torch.no_grad()
def _right(model: LlavaForConditionalGeneration, heads: _Heads, check: Labelled) -> tuple[float, float, float]:
    """Shares of full cells, of whole pictures and of counts that are right."""
    rows = rows_of(model, check.pixels)
    cells = heads.contents(rows).argmax(-1) == check.contents
    counts = heads.counted(rows).sum(1).argmax(-1) == check.counts
    return (
        float(cells[check.contents != 0].float().mean()),
        float(cells.all(1).float().mean()),
        float(counts.float().mean()),
    )
