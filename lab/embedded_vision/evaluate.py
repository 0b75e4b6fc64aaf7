"""Exact match of the embedded vision model on held-out pictures, by greedy generation in transformers.

python -m lab.embedded_vision.evaluate --model services/embedded_vision --n 200 --dtype float32
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import LlavaForConditionalGeneration

from lab.embedded_model.tokenizer import EOS_ID, PAD_ID
from lab.embedded_vision.drawing import draw
from lab.embedded_vision.model import pixels_of, prompt_ids
from lab.embedded_vision.scenes import Part, scenes
from lab.embedded_vision.words import TASKS, Question, build_tokenizer

SEED: Final = 2027
BATCH: Final = 50
MAX_ANSWER: Final = 32
REQUIRED: Final = 0.95
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def asked_pictures(task: str, count: int, seed: int, part: Part = "held_out") -> list[tuple[np.ndarray, Question]]:
    """Pictures of one part of the scenes, each with a question; the same for the same arguments."""
    rng = random.Random(f"{part}/{task}/{seed}")
    source = scenes(TASKS[task].make, part, rng)
    found: list[tuple[np.ndarray, Question]] = []
    while len(found) < count:
        scene = next(source)
        question = TASKS[task].ask(scene, rng)
        found.append((draw(scene, rng), question))
    return found


@torch.no_grad()
def answers(model: LlavaForConditionalGeneration, asked: Sequence[tuple[np.ndarray, Question]]) -> list[str]:
    """The answers to questions about pictures; one that does not end is marked by a trailing ellipsis."""
    prompts = [prompt_ids(question.text) for _, question in asked]
    length = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    pixels = pixels_of([picture for picture, _ in asked]).to(model.dtype)
    generating: Any = model
    out = generating.generate(
        input_ids=ids, attention_mask=mask, pixel_values=pixels, max_new_tokens=MAX_ANSWER, do_sample=False
    )
    return [_text(row) for row in out[:, length:].tolist()]


def _text(row: list[int]) -> str:
    end = row.index(EOS_ID) if EOS_ID in row else len(row)
    text = str(build_tokenizer().decode(row[:end]))
    return text if end < len(row) else f"{text}..."


def share_right(model: LlavaForConditionalGeneration, task: str, count: int, show_wrong: int) -> float:
    """Share of held-out pictures that are answered exactly; prints the first misses to stderr."""
    asked = asked_pictures(task, count, SEED)
    right = 0
    for start in range(0, count, BATCH):
        part = asked[start : start + BATCH]
        for (_, question), answer in zip(part, answers(model, part), strict=True):
            right += answer == question.answer
            if answer != question.answer and show_wrong > 0:
                show_wrong -= 1
                print(f"{task}: {question.text} want {question.answer!r}, got {answer!r}", file=sys.stderr)
    return right / count


def main() -> int:
    """Evaluate every task; 1 if one is below ``REQUIRED``."""
    parser = argparse.ArgumentParser(description="Exact match of the embedded vision model on held-out pictures.")
    parser.add_argument("--model", type=Path, default=Path("services/embedded_vision"))
    parser.add_argument("--n", type=int, default=200, help="pictures a task")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="type computed in")
    parser.add_argument("--show-wrong", type=int, default=0, help="misses to print for each task")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = LlavaForConditionalGeneration.from_pretrained(arguments.model, dtype=DTYPES[arguments.dtype]).eval()
    shares = {}
    for task in TASKS:
        shares[task] = share_right(model, task, arguments.n, arguments.show_wrong)
        print(f"{task:<14}{round(shares[task] * arguments.n):>5} of {arguments.n} ({100 * shares[task]:.1f} %)")
    return int(min(shares.values()) < REQUIRED)


if __name__ == "__main__":
    sys.exit(main())
