"""Measure the embedded model: exact match on held-out inputs, task by task, by greedy decoding.

    python -m lab.embedded_model.evaluate --model services/embedded_model --n 200 --dtype float32

Prints a table in Markdown and exits with status 1 if a task is under 95 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from farsight.services.bench.report import markdown_table
from lab.embedded_model.tasks import TASKS, Example, Task, held_out_examples

REQUIRED_PERCENT: Final = 95.0
EVALUATION_SEED: Final = 20
"""Seed of the held-out inputs; what keeps them out of training is the split, not the seed."""
BATCH_SIZE: Final = 100
LONGEST_ANSWER: Final = 320
"""Tokens after which an answer that has not ended counts as wrong."""
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEADER: Final = ("task", "instruction (one of several)", "answer length", "mean input, tokens", "mean answer, tokens")
"""Lengths are in tokens, which are bytes; that of an answer holds its EOS."""


def answers(model: Any, tokenizer: Any, examples: Sequence[Example]) -> list[str | None]:
    """Greedy answers to a batch of examples, ``None`` for one that did not end by itself."""
    conversations = [
        [{"role": "system", "content": example.instruction}, {"role": "user", "content": example.text}]
        for example in examples
    ]
    batch = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        generated = model.generate(**batch, do_sample=False, max_new_tokens=LONGEST_ANSWER)
    decoded: list[str | None] = []
    for row in generated[:, batch["input_ids"].shape[1] :].tolist():
        ended = tokenizer.eos_token_id in row
        decoded.append(tokenizer.decode(row[: row.index(tokenizer.eos_token_id)]) if ended else None)
    return decoded


def num_right(model: Any, tokenizer: Any, examples: Sequence[Example], show_wrong: int) -> int:
    """Returns how many answers match exactly; prints the first ``show_wrong`` misses to stderr."""
    right, shown = 0, 0
    for start in range(0, len(examples), BATCH_SIZE):
        batch = examples[start : start + BATCH_SIZE]
        for example, answer in zip(batch, answers(model, tokenizer, batch), strict=True):
            right += answer == example.answer
            if answer != example.answer and shown < show_wrong:
                shown += 1
                miss = f"{example.task}: {example.prompt!r}\n  want {example.answer!r}\n  got  {answer!r}"
                print(miss, file=sys.stderr)
    return right


def row(task: Task, examples: Sequence[Example], right: int) -> list[str]:
    """Returns the cells of one task."""
    num = len(examples)
    input_tokens = sum(len(example.text) for example in examples) / num
    answer_tokens = sum(len(example.answer) + 1 for example in examples) / num
    figures = [f"{input_tokens:.0f}", f"{answer_tokens:.0f}", f"{right} of {num} ({100 * right / num:.1f} %)"]
    return [task.name, task.instructions[0], task.length_class, *figures]


def main() -> int:
    """Evaluate every task; the exit status."""
    parser = argparse.ArgumentParser(description="Exact match of the embedded model on held-out inputs.")
    parser.add_argument("--model", type=Path, default=Path("services/embedded_model"))
    parser.add_argument("--n", type=int, default=200, help="held-out inputs a task")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="type computed in")
    parser.add_argument("--show-wrong", type=int, default=0, help="misses to print for each task")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=DTYPES[arguments.dtype]).eval()
    rows, least = [], arguments.n
    for task in TASKS:
        examples = sorted(held_out_examples(task, arguments.n, EVALUATION_SEED), key=lambda each: len(each.answer))
        right = num_right(model, tokenizer, examples, arguments.show_wrong)
        rows.append(row(task, examples, right))
        least = min(least, right)
    print(markdown_table([*HEADER, "exact match"], rows))
    return int(100 * least < REQUIRED_PERCENT * arguments.n)


if __name__ == "__main__":
    sys.exit(main())
