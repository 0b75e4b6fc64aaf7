"""Second stage of the training: the text model learns to answer from the projector's rows.

Several questions are asked about one picture in one sequence: BOS and the picture's rows, then each question with
its answer, as if it stood alone behind the picture (its positions go on from the picture's, and it attends to the
picture and itself). The loss is taken on answers and their EOS alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlavaForConditionalGeneration

from lab.embedded_model.tokenizer import EOS_ID, PAD_ID
from lab.embedded_vision.drawing import draw
from lab.embedded_vision.model import PATCHES, pixels_of, prompt_ids
from lab.embedded_vision.scenes import Part, Scene, number_scene, scenes, shapes_scene
from lab.embedded_vision.tower import rows_of
from lab.embedded_vision.words import TASKS, Question, encode

IGNORED = -100
PREFIX = PATCHES + 1
"""BOS and the picture."""
ASKED = ("each_kind", "count_kind", "count_kind", "count_all")
"""Tasks asked about every training picture of shapes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pictures with questions.

    Attributes:
        pixels: ``[n, 3, side, side]``.
        ids: ``[n, tokens]``, padded on the right.
        positions: ``[n, tokens]``.
        segments: ``[n, tokens]``: 0 for the picture, then the number of the question; -1 for padding.
        targets: ``[n, tokens]``: the token that comes next where it belongs to an answer, else ``IGNORED``.
    """

    pixels: Tensor
    ids: Tensor
    positions: Tensor
    segments: Tensor
    targets: Tensor


def collate(pictures: Tensor, questions: Sequence[Sequence[Question]]) -> Batch:
    """A batch of pixels and the questions about each picture."""
    rows = [_row(asked) for asked in questions]
    shape = (len(rows), max(len(row[0]) for row in rows))
    ids, positions = torch.full(shape, PAD_ID), torch.zeros(shape, dtype=torch.long)
    segments, targets = torch.full(shape, -1), torch.full(shape, IGNORED)
    for index, row in enumerate(rows):
        for whole, part in zip((ids, positions, segments, targets), row, strict=True):
            whole[index, : len(part)] = torch.tensor(part)
    return Batch(pictures, ids, positions, segments, targets)


def _row(questions: Sequence[Question]) -> tuple[list[int], list[int], list[int], list[int]]:
    ids = prompt_ids("")[:PREFIX]
    positions, segments, targets = list(range(PREFIX)), [0] * PREFIX, [IGNORED] * PREFIX
    for number, question in enumerate(questions, 1):
        prompt = prompt_ids(question.text)[PREFIX:]
        answer = [*encode(question.answer), EOS_ID]
        ids += [*prompt, *answer[:-1]]
        targets += [*[IGNORED] * (len(prompt) - 1), *answer]
        length = len(prompt) + len(answer) - 1
        positions += range(PREFIX, PREFIX + length)
        segments += [number] * length
    return ids, positions, segments, targets


def answer_logits(model: LlavaForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[m, vocabulary]``, targets ``[m]`` and the indices ``[m, 2]`` of the answers' tokens."""
    embedded = model.model.get_input_embeddings()(batch.ids)
    rows = rows_of(model, batch.pixels)
    embedded = torch.cat([embedded[:, :1], rows, embedded[:, PREFIX:]], 1)
    segments = batch.segments
    length = segments.shape[1]
    own = segments[:, :, None] == segments[:, None, :]
    seen = (own | (segments == 0)[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]
    hidden = model.model.language_model(
        inputs_embeds=embedded, attention_mask=mask, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    wanted = batch.targets != IGNORED
    return model.lm_head(hidden[wanted]), batch.targets[wanted], wanted.nonzero()


def answer_loss(model: LlavaForConditionalGeneration, batch: Batch) -> Tensor:
    """Mean over questions of the mean loss over the answer's tokens to the power of a half, in nats."""
    logits, targets, places = answer_logits(model, batch)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    segment = batch.segments[places[:, 0], places[:, 1]]
    question = places[:, 0] * (int(batch.segments.max()) + 1) + segment
    _, which, counts = question.unique(return_inverse=True, return_counts=True)
    weights = counts.float().rsqrt()[which]
    return (losses * weights).sum() / len(counts)


@torch.no_grad()
def right_answers(model: LlavaForConditionalGeneration, batch: Batch) -> list[list[bool]]:
    """Whether greedy decoding gives each answer: each of its tokens is likeliest after the right ones before it."""
    logits, targets, places = answer_logits(model, batch)
    right = [[True] * int(row.max()) for row in batch.segments]
    for row, token in places[logits.argmax(-1) != targets].tolist():
        right[row][int(batch.segments[row, token]) - 1] = False
    return right


@torch.no_grad()
def margin(model: LlavaForConditionalGeneration, picture: np.ndarray, question: Question) -> float:
    """Returns how far the right answer is ahead: the least distance of its tokens' logits to the next best token's.

    Below 0 greedy decoding gives another answer.
    """
    logits, targets, _ = answer_logits(model, collate(pixels_of([picture]), [[question]]))
    right = logits.gather(1, targets[:, None])[:, 0]
    others = logits.scatter(1, targets[:, None], -torch.inf).amax(1)
    return float((right - others).min())


class TrainingPictures:
    """Batches of training pictures with questions, by a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"answers/{seed}")
        self._shapes = scenes(shapes_scene, "training", self._rng)
        self._numbers = scenes(number_scene, "training", self._rng)

    def shapes(self, count: int) -> Batch:
        """Pictures of shapes, several questions each."""
        return self._batch([next(self._shapes) for _ in range(count)])

    def numbers(self, count: int) -> Batch:
        """Pictures of numbers, one question each."""
        return self._batch([next(self._numbers) for _ in range(count)])

    def _batch(self, drawn: Sequence[Scene]) -> Batch:
        pictures = pixels_of([draw(scene, self._rng) for scene in drawn])
        return collate(pictures, [self._questions(scene) for scene in drawn])

    def _questions(self, scene: Scene) -> list[Question]:
        names = ("read",) if scene.number else ASKED
        return [TASKS[name].ask(scene, self._rng) for name in names]


def check_batches(part: Part, count: int, seed: int) -> dict[str, Batch]:
    """One question about each of ``count`` pictures of every task, drawn from a part of the scenes."""
    batches = {}
    for name, task in TASKS.items():
        rng = random.Random(f"check/{part}/{name}/{seed}")
        source = scenes(task.make, part, rng)
        pictures: list[np.ndarray] = []
        questions: list[list[Question]] = []
        while len(questions) < count:
            scene = next(source)
            questions.append([task.ask(scene, rng)])
            pictures.append(draw(scene, rng))
        batches[name] = collate(pixels_of(pictures), questions)
    return batches
