"""Measure the embedded model: exact match on held-out inputs, task by task, by greedy decoding.

    python -m lab.embedded_model.evaluate --model services/embedded_model --n 200 --dtype float32

Prints a table and exits with status 1 if a task is under 95 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.embedded_model.tasks import TASKS, Example, Task, held_out_examples

REQUIRED_PERCENT: Final = 95.0
EVALUATION_SEED: Final = 20
"""Seed of the held-out inputs; what keeps them out of training is the split, not the seed."""
BATCH_SIZE: Final = 100
LONGEST_ANSWER: Final = 320
"""Tokens after which an answer that has not ended counts as wrong."""
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TaskResult:
    """The result of one task."""

    task: str
    instruction: str
    length_class: str
    right: int
    of: int
    input_tokens: float
    """Mean length of the user inputs, in tokens (bytes)."""
    answer_tokens: float
    """Mean length of the right answers, in tokens (bytes), EOS included."""

    @property
    def percent(self) -> float:
        """Exact matches in percent."""
        return 100.0 * self.right / self.of


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


def evaluate_task(model: Any, tokenizer: Any, task: Task, n: int, show_wrong: int) -> TaskResult:
    """Exact match of one task on ``n`` held-out inputs; prints the first ``show_wrong`` misses to stderr."""
    examples = sorted(held_out_examples(task, n, EVALUATION_SEED), key=lambda example: len(example.answer))
    right, shown = 0, 0
    for start in range(0, n, BATCH_SIZE):
        batch = examples[start : start + BATCH_SIZE]
        for example, answer in zip(batch, answers(model, tokenizer, batch), strict=True):
            right += answer == example.answer
            if answer != example.answer and shown < show_wrong:
                shown += 1
                print(
                    f"{task.name}: {example.prompt!r}\n  want {example.answer!r}\n  got  {answer!r}",
                    file=sys.stderr,
                )
    return TaskResult(
        task=task.name,
        instruction=task.instructions[0],
        length_class=task.length_class,
        right=right,
        of=n,
        input_tokens=sum(len(example.text) for example in examples) / n,
        answer_tokens=sum(len(example.answer) + 1 for example in examples) / n,
    )


def markdown_table(results: Sequence[TaskResult]) -> str:
    """The results as a markdown table."""
    lines = [
        "| task | instruction (one of several) | answer length | mean input, tokens | mean answer, tokens "
        "| exact match |",
        "|---|---|---|---:|---:|---:|",
    ]
    lines.extend(
        f"| {result.task} | {result.instruction} | {result.length_class} | {result.input_tokens:.0f} "
        f"| {result.answer_tokens:.0f} | {result.right} of {result.of} ({result.percent:.1f} %) |"
        for result in results
    )
    return "\n".join(lines) + "\n"


def plain_table(results: Sequence[TaskResult]) -> str:
    """The results as aligned plain text."""
    lines = [f"{'task':<14}{'instruction':<30}{'length':<13}{'exact match':>12}"]
    lines.extend(
        f"{result.task:<14}{result.instruction:<30}{result.length_class:<13}"
        f"{result.right:>5} of {result.of} ({result.percent:.1f} %)"
        for result in results
    )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Exact match of the embedded model on held-out inputs.")
    parser.add_argument("--model", type=Path, default=Path("services/embedded_model"))
    parser.add_argument("--n", type=int, default=200, help="held-out inputs a task")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="type computed in")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--show-wrong", type=int, default=0, help="misses to print for each task")
    return parser.parse_args()


def main() -> int:
    """Evaluate every task; the exit status."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=DTYPES[arguments.dtype]).eval()
    results = [evaluate_task(model, tokenizer, task, arguments.n, arguments.show_wrong) for task in TASKS]
    print(plain_table(results))
    if arguments.json:
        rows = [{**asdict(result), "percent": result.percent} for result in results]
        report = {"dtype": arguments.dtype, "seed": EVALUATION_SEED, "results": rows}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(markdown_table(results))
    return int(any(result.percent < REQUIRED_PERCENT for result in results))


if __name__ == "__main__":
    sys.exit(main())
