"""What weights in 8 and 4 bits cost in quality: ``python -m benchmarks.weights_quality --text-model build/text``.

Two models: the embedded one (exact match of its tasks on held-out inputs, and the perplexity of the right answers), and
a byte-pair model of Python's standard library, which is trained here if its directory is empty (perplexity of files
that it has not seen). Every line is computed by the engine, with the weights rounded as ``engine.weights`` says.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.common.text_model import TEXT_STEPS, held_out_text, train_text_model
from core.config.engine import WEIGHTS, EngineConfig
from core.request import Request, SamplingParams
from engine.build import BITS
from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.weights import parse_dtype
from engine.engine import Engine
from engine.sequence import Sequence
from engine.steps.model_runner import ModelRunner
from kvcache import StepBatch, StepItem
from services.bench.report import markdown_table, provenance, write_json
from tools.embedded_model.evaluate import EVALUATION_SEED, LONGEST_ANSWER
from tools.embedded_model.tasks import TASKS, Example, held_out_examples

EMBEDDED = Path("services/embedded_model")
BLOCK_SIZE = 32
TEXT_WINDOW = 512
TEXT_WINDOWS = 60


def main() -> None:
    """Prints a row for each kind of weights."""
    args = _parse()
    if args.text_model and not (args.text_model / "config.json").is_file():
        train_text_model(args.text_model, args.steps)
    results = [_measure(weights, args) for weights in args.weights]
    columns = list(results[0])
    print(markdown_table(columns, [[row[column] for column in columns] for row in results]))
    write_json(args.json, {**provenance(["python", "-m", "benchmarks.weights_quality"]), "results": results})


def _measure(weights: str, args: argparse.Namespace) -> dict[str, str]:
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED)
    examples = [example for task in TASKS for example in held_out_examples(task, args.n, EVALUATION_SEED)]
    prompts = [_prompt(tokenizer, example) for example in examples]
    right = exact_matches(args.dtype, weights, prompts, [_answer(tokenizer, example) for example in examples])
    known = [prompt + _answer(tokenizer, example) for prompt, example in zip(prompts, examples, strict=True)]
    row = {
        "weights": weights,
        "exact match": f"{right} of {len(examples)}",
        "perplexity of answers": f"{perplexity(EMBEDDED, args.dtype, weights, known, [len(p) for p in prompts]):.5f}",
    }
    if args.text_model:
        windows = _windows(args.text_model)
        row["perplexity of text"] = (
            f"{perplexity(args.text_model, args.dtype, weights, windows, [1] * len(windows)):.4f}"
        )
    return row


def exact_matches(dtype: str, weights: str, prompts: list[list[int]], answers: list[list[int]]) -> int:
    """Greedy answers of the embedded model that equal the right ones, EOS included."""
    engine = Engine(EMBEDDED, dtype=dtype, engine=EngineConfig(weights=weights))
    outputs = engine.generate(prompts, SamplingParams(LONGEST_ANSWER))
    return sum(list(output.token_ids) == answer for output, answer in zip(outputs, answers, strict=True))


@torch.inference_mode()
def perplexity(model: Path, dtype: str, weights: str, rows: Rows[list[int]], firsts: Rows[int]) -> float:
    """Perplexity of the tokens of each row from number ``first`` on, each row computed in one step."""
    config = load_model_config(model)
    num_blocks = max(-(-len(row) // BLOCK_SIZE) for row in rows)
    runner = ModelRunner.from_dir(
        model, dtype=parse_dtype(dtype, config), num_blocks=num_blocks, block_size=BLOCK_SIZE, bits=BITS[weights]
    )
    total, count = 0.0, 0
    for row, first in zip(rows, firsts, strict=True):
        sequence = Sequence.of(Request("row", 0, "", tuple(row), SamplingParams(1)))
        batch = StepBatch((StepItem("row", 0, len(row), True, list(range(num_blocks))),))
        wanted = list(range(first - 1, len(row) - 1))
        logits = runner.backend.run(batch, [0], {"row": sequence}, wanted).logits[: len(wanted)]
        targets = torch.tensor(row[first:])
        total += torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum").item()
        count += len(targets)
    return math.exp(total / count)


def _prompt(tokenizer: Any, example: Example) -> list[int]:
    conversation = [{"role": "system", "content": example.instruction}, {"role": "user", "content": example.text}]
    return list(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))


def _answer(tokenizer: Any, example: Example) -> list[int]:
    return [*tokenizer.encode(example.answer, add_special_tokens=False), tokenizer.eos_token_id]


def _windows(model: Path) -> list[list[int]]:
    """Consecutive tokens of text that was not trained on."""
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(held_out_text(), add_special_tokens=False).ids
    starts = range(0, len(ids) - TEXT_WINDOW, max(TEXT_WINDOW, len(ids) // TEXT_WINDOWS))
    return [ids[start : start + TEXT_WINDOW] for start in starts]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS[1:], default=WEIGHTS[1:])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--n", type=int, default=200, help="held-out inputs of each task")
    parser.add_argument("--text-model", type=Path, help="directory of the text model; trained if it has none")
    parser.add_argument("--steps", type=int, default=TEXT_STEPS, help="training steps of the text model")
    parser.add_argument("--json", type=Path, help="write every number here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
