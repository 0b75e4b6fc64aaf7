"""Train the embedded vision model from scratch on one CPU core.

    python -m tools.embedded_vision.train --out services/embedded_vision_model --checkpoint build/embedded_vision.pt

Pictures are drawn on the fly from the training side of the split (``drawings.is_held_out``). A prompt is a question,
then its picture, so that each patch knows what is asked: asked behind the picture, questions were not understood after
the same time. The loss is taken on the answer and its EOS. A second loss, of layers that are thrown away, asks each
patch what lies in its middle, and the class token how many shapes of each kind there are: the tower learns to see far
sooner so, and begins with that loss alone. The text model reads the class token too
(``vision_feature_select_strategy`` is ``full``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionConfig, GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from tools.embedded_model.tokenizer import (
    BOS_ID,
    EOS_ID,
    MAX_POSITIONS,
    PAD_ID,
    SEP_ID,
    VOCABULARY_SIZE,
    encode_bytes,
)
from tools.embedded_vision.drawings import COLOURS, KINDS, MAX_SHAPES, NUM_LABELS, SIDE, Drawing, draw
from tools.embedded_vision.tokenizer import IMAGE_ID, save_vision_tokenizer

STEPS: Final = 2000
SEEING_STEPS: Final = 500
"""First steps, of the tower alone."""
SEED: Final = 1
PICTURES: Final = 48
"""Pictures of a step; one in three is of a number."""
PEAK_LEARNING_RATE: Final = 2e-3
WARM_UP_STEPS: Final = 60
WEIGHT_DECAY: Final = 0.05
GRADIENT_CLIP: Final = 1.0
SEEN_WEIGHT: Final = 0.5
"""Weight of the loss of what each patch sees."""
IGNORED: Final = -100

INPUT: Final = 48
"""Pixels of a side of what the tower reads."""
PATCH: Final = 8
PATCHES: Final = (INPUT // PATCH) ** 2
IMAGE_TOKENS: Final = PATCHES + 1
"""The class token first."""
WIDTH: Final = 96
MEAN_STD: Final = 0.5


def build_model() -> LlavaForConditionalGeneration:
    """The untrained model."""
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=INPUT,
            patch_size=PATCH,
            projection_dim=WIDTH,
        ),
        text_config=LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
            tie_word_embeddings=True,
        ),
        image_token_index=IMAGE_ID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


PROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": INPUT, "width": INPUT},
    "size": {"height": INPUT, "width": INPUT},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [MEAN_STD] * 3,
    "image_std": [MEAN_STD] * 3,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
"""``preprocessor_config.json``."""


def pixels_of(drawings: Sequence[Drawing]) -> Tensor:
    """float32 ``[pictures, 3, INPUT, INPUT]``, as ``PROCESSOR`` says."""
    small = [
        np.asarray(Image.fromarray(each.rgb).resize((INPUT, INPUT), Image.Resampling.BICUBIC)) for each in drawings
    ]
    return (torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).float() / 255 - MEAN_STD) / MEAN_STD


def sequence_of(drawing: Drawing) -> tuple[list[int], list[int]]:
    """Token ids of the first question, and the target behind each: ``IGNORED`` but for the answer's."""
    question, answer = drawing.questions[0]
    asked, said = [BOS_ID, *encode_bytes(question), *[IMAGE_ID] * IMAGE_TOKENS, SEP_ID], [*encode_bytes(answer), EOS_ID]
    return asked + said, [IGNORED] * (len(asked) - 1) + said + [IGNORED]


@dataclass(frozen=True, slots=True)
class PictureBatch:
    """What a part of a step is computed from.

    Attributes:
        pixels: float32 ``[pictures, 3, INPUT, INPUT]``.
        inputs, targets: int64 ``[pictures, tokens]``.
        seen: Labels of patches, int64 ``[pictures, patches]``.
        counts: Shapes of each kind, and all of them, int64 ``[pictures, kinds + 1]``.
    """

    pixels: Tensor
    inputs: Tensor
    targets: Tensor
    seen: Tensor
    counts: Tensor


def collate(drawings: Sequence[Drawing]) -> PictureBatch:
    """Padded on the right."""
    sequences = [sequence_of(each) for each in drawings]
    length = max(len(ids) for ids, _ in sequences)
    inputs, targets = torch.full((len(drawings), length), PAD_ID), torch.full((len(drawings), length), IGNORED)
    seen = torch.full((len(drawings), PATCHES), NUM_LABELS)
    counts = torch.zeros((len(drawings), len(KINDS) + 1), dtype=torch.long)
    for row, (drawing, (ids, wanted)) in enumerate(zip(drawings, sequences, strict=True)):
        inputs[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(wanted)] = torch.tensor(wanted)
        for mark in drawing.marks:
            x, y = (min(int(each / SIDE * INPUT / PATCH), INPUT // PATCH - 1) for each in (mark.x, mark.y))
            seen[row, y * (INPUT // PATCH) + x] = mark.label
            if mark.label < len(KINDS) * len(COLOURS):
                counts[row, mark.label // len(COLOURS)] += 1
                counts[row, -1] += 1
    return PictureBatch(pixels_of(drawings), inputs, targets, seen, counts)


def features_of(model: LlavaForConditionalGeneration, pixels: Tensor) -> Tensor:
    """What the tower makes of the class token and of each patch, ``[pictures, IMAGE_TOKENS, WIDTH]``."""
    rows: Tensor = model.model.vision_tower(pixels).last_hidden_state
    return rows


def answer_logits(model: LlavaForConditionalGeneration, batch: PictureBatch, features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[n, vocabulary]`` of the positions with a target, and their rows in the batch."""
    embeddings = model.get_input_embeddings()(batch.inputs)
    projected = model.model.multi_modal_projector(features).to(embeddings.dtype)
    embeddings = embeddings.masked_scatter((batch.inputs == IMAGE_ID)[..., None], projected)
    hidden = model.model.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    wanted = batch.targets != IGNORED
    return model.lm_head(hidden[wanted]).float(), wanted.nonzero()[:, 0]


class Judge(nn.Module):
    """What the tower is asked beside; thrown away in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seer = nn.Linear(WIDTH, NUM_LABELS + 1)
        self.counter = nn.Linear(WIDTH, (len(KINDS) + 1) * (MAX_SHAPES + 1))

    def loss(self, features: Tensor, batch: PictureBatch) -> Tensor:
        """What the patches see and what the class token counts, both judged."""
        weights = torch.ones(NUM_LABELS + 1)
        weights[-1] = 0.2  # most patches hold nothing
        seen = functional.cross_entropy(self.seer(features[:, 1:]).flatten(0, 1), batch.seen.flatten(), weights)
        counted = self.counter(features[:, 0]).view(-1, MAX_SHAPES + 1)
        return seen + functional.cross_entropy(counted, batch.counts.flatten())


def train_part(
    model: LlavaForConditionalGeneration, judge: Judge, batch: PictureBatch, share: float, *, answers: bool
) -> tuple[float, float]:
    """Adds the gradients of a part of a step; returns the losses of its answers and of its tower.

    Args:
        share: Part of the step's pictures that it holds.
        answers: Whether answers are learned yet.
    """
    features = features_of(model, batch.pixels)
    seen = judge.loss(features, batch)
    loss, said = SEEN_WEIGHT * seen, torch.zeros(())
    if answers:
        logits, _ = answer_logits(model, batch, features)
        said = functional.cross_entropy(logits, batch.targets[batch.targets != IGNORED])
        loss = loss + said
    (loss * share).backward()
    return said.item(), seen.item()


@torch.no_grad()
def exact_share(model: LlavaForConditionalGeneration, drawings: Sequence[Drawing]) -> float:
    """Share of pictures whose first question greedy decoding would answer exactly."""
    batch = collate(drawings)
    logits, rows = answer_logits(model, batch, features_of(model, batch.pixels))
    wrong = rows[logits.argmax(-1) != batch.targets[batch.targets != IGNORED]]
    return 1 - int(wrong.unique().numel()) / len(drawings)


def draw_step(seed: int, step: int) -> tuple[list[Drawing], list[Drawing]]:
    """The pictures of a step: of numbers, and of shapes."""
    rng, numbers = random.Random(f"{seed}/{step}"), PICTURES // 3
    drawn = [draw(rng, held_out=False, numbers=index < numbers) for index in range(PICTURES)]
    return drawn[:numbers], drawn[numbers:]


def held_out(count: int, seed: int, *, numbers: bool) -> list[Drawing]:
    """Pictures that are never trained on."""
    rng = random.Random(f"held out {seed}")
    return [draw(rng, held_out=True, numbers=numbers) for _ in range(count)]


def learning_rate(step: int, steps: int, seeing_steps: int) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    if step < WARM_UP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARM_UP_STEPS
    if step < seeing_steps:
        return PEAK_LEARNING_RATE
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)))


def export(model: LlavaForConditionalGeneration, out: Path) -> None:
    """Write the model with bfloat16 weights, its settings, its tokenizer and its processor."""
    out.mkdir(parents=True, exist_ok=True)
    stored: Any = build_model()
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16)
    stored.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False
    )
    stored.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    save_vision_tokenizer(out)
    (out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n", encoding="utf-8")


def train(arguments: argparse.Namespace) -> None:
    """Run or resume the training and write the model."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = build_model()
    judge = Judge()
    if arguments.begin_with:
        model.load_state_dict(torch.load(arguments.begin_with, weights_only=True)["model"])
    parameters = [*model.parameters(), *judge.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    step = 0
    if arguments.resume and arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        judge.load_state_dict(state["judge"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < arguments.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments.steps, arguments.seeing_steps)
        parts = draw_step(arguments.seed, step)
        losses = [
            train_part(model, judge, collate(part), len(part) / PICTURES, answers=step >= arguments.seeing_steps)
            for part in parts
        ]
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            shown = ", ".join(f"answers {said:.3f} tower {seen:.3f}" for said, seen in losses)
            print(f"{step} {time.process_time():.0f} s of CPU: numbers, shapes: {shown}", flush=True)
        if step % arguments.report_every == 0 or step == arguments.steps:
            shares = [exact_share(model, held_out(200, 2, numbers=each)) for each in (False, True)]
            print(f"  step {step}: held out, shapes {shares[0]:.1%}, numbers {shares[1]:.1%}", flush=True)
            arguments.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            temporary = arguments.checkpoint.with_suffix(".tmp")
            states: dict[str, Any] = {"model": model, "judge": judge, "optimizer": optimizer}
            torch.save({"step": step} | {name: each.state_dict() for name, each in states.items()}, temporary)
            os.replace(temporary, arguments.checkpoint)
    export(model, arguments.out)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the embedded vision model from scratch on one CPU core.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model files")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeing-steps", type=int, default=SEEING_STEPS, help="first steps, of the tower alone")
    parser.add_argument("--begin-with", type=Path, help="a checkpoint whose weights to begin with")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/embedded_vision.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint if there is one")
    parser.add_argument("--report-every", type=int, default=200, help="steps between reports and checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
