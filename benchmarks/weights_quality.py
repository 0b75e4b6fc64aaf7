"""What weights in 8 and 4 bits, and keys and values in 8, cost in quality.

``python -m benchmarks.weights_quality --text-model build/text``, and the same with ``--kv-dtype int8``.

Two models: the embedded one (exact match of its tasks on held-out inputs, and the perplexity of the right answers), and
a byte-pair model of Python's standard library, which is trained here if its directory is empty (files that it has not
seen: their perplexity, and how far the distributions are from those of full weights in float32). Every line is computed
by the engine, with the weights rounded as ``engine.weights`` says.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common.text_model import TEXT_STEPS, held_out_text, train_text_model
from farsight.core.config.engine import KV_DTYPES, WEIGHTS, EngineConfig
from farsight.core.request import Request, SamplingParams
from farsight.engine.build import BITS
from farsight.engine.checkpoint.dtypes import parse_dtype
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.engine import Engine
from farsight.engine.sequence import Sequence
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import StepBatch, StepItem
from farsight.services.bench.report import markdown_table, provenance, write_json
from lab.embedded_model.evaluate import EVALUATION_SEED, LONGEST_ANSWER
from lab.embedded_model.tasks import TASKS, Example, held_out_examples

EMBEDDED = Path("services/embedded_model")
BLOCK_SIZE = 32
TEXT_WINDOW = 512
TEXT_WINDOWS = 60


def main() -> None:
    """Prints a row for each kind of weights."""
    args = _parse()
    if args.text_model and not (args.text_model / "config.json").is_file():
        train_text_model(args.text_model, args.steps)
    results = [_embedded(weights, args) for weights in args.weights]
    if args.text_model:
        rows = _windows(args.text_model)
        full = logits_of(args.text_model, "float32", "full", rows)
        for result in results:
            found = logits_of(args.text_model, args.dtype, result["weights"], rows, args.kv_dtype)
            result |= compared(rows, found, full)
    columns = list(results[0])
    print(markdown_table(columns, [[row[column] for column in columns] for row in results]))
    write_json(args.json, {**provenance(["python", "-m", "benchmarks.weights_quality"]), "results": results})


def _embedded(weights: str, args: argparse.Namespace) -> dict[str, str]:
    examples = [example for task in TASKS for example in held_out_examples(task, args.n, EVALUATION_SEED)]
    prompts, answers = prompts_and_answers(examples)
    right = exact_matches(args.dtype, weights, prompts, answers, args.kv_dtype)
    known = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    found = logits_of(EMBEDDED, args.dtype, weights, known, args.kv_dtype)
    losses = [
        token_losses(row, logits)[len(prompt) - 1 :] for prompt, row, logits in zip(prompts, known, found, strict=True)
    ]
    return {
        "weights": weights,
        "keys and values": args.kv_dtype,
        "exact match": f"{right} of {len(examples)}",
        "perplexity of answers": f"{math.exp(torch.cat(losses).mean().item()):.5f}",
    }


def compared(rows: list[list[int]], found: list[Tensor], full: list[Tensor]) -> dict[str, str]:
    """Perplexity, and how far the distributions are from those of full weights in float32."""
    losses = torch.cat([token_losses(row, logits) for row, logits in zip(rows, found, strict=True)])
    ours, theirs = torch.cat(found).log_softmax(-1), torch.cat(full).log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    return {
        "perplexity of text": f"{math.exp(losses.mean().item()):.3f}",
        "divergence (nats)": f"{divergence:.6f}",
        "same likeliest token": f"{100 * same:.2f} %",
    }


def exact_matches(
    dtype: str, weights: str, prompts: list[list[int]], answers: list[list[int]], kv_dtype: str = "auto"
) -> int:
    """Greedy answers of the embedded model that equal the right ones, EOS included."""
    engine = Engine(EMBEDDED, dtype=dtype, engine=EngineConfig(weights=weights, kv_dtype=kv_dtype))
    outputs = engine.generate(prompts, SamplingParams(LONGEST_ANSWER))
    return sum(list(output.token_ids) == answer for output, answer in zip(outputs, answers, strict=True))


def logits_of(model: Path, dtype: str, weights: str, rows: list[list[int]], kv_dtype: str = "auto") -> list[Tensor]:
    """Logits behind every token of each row but its last, each row computed in one step."""
    compute = RowLogits(model, dtype, weights, max(map(len, rows)), kv_dtype)
    return [compute(row) for row in rows]


class RowLogits:
    """A model that computes rows of tokens, each in one step.

    Args:
        longest: Tokens of the longest row.
    """

    def __init__(self, model: Path, dtype: str, weights: str, longest: int, kv_dtype: str = "auto") -> None:
        self._blocks = list(range(-(-longest // BLOCK_SIZE)))
        self._runner = ModelRunner.from_dir(
            model,
            dtype=parse_dtype(dtype, load_model_config(model)),
            num_blocks=len(self._blocks),
            block_size=BLOCK_SIZE,
            bits=BITS[weights],
            keep_quantized=weights != "float",
            kv_dtype=kv_dtype,
        )

    def __call__(self, row: list[int]) -> Tensor:
        """The logits behind every token of a row but its last, shape (tokens - 1, vocabulary)."""
        sequence = Sequence.of(Request("row", 0, "", tuple(row), SamplingParams(1)))
        batch = StepBatch((StepItem("row", 0, len(row), True, self._blocks),))
        logits = self._runner.backend.run(batch, [0], {"row": sequence}, list(range(len(row) - 1))).logits
        return logits[: len(row) - 1].clone()


def token_losses(row: list[int], logits: Tensor) -> Tensor:
    """Negative log likelihoods of a row's tokens but the first."""
    return torch.nn.functional.cross_entropy(logits.double(), torch.tensor(row[1:]), reduction="none")


def prompts_and_answers(examples: list[Example]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids for the embedded model; an answer ends with EOS."""
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED)
    prompts, answers = [], []
    for example in examples:
        conversation = [{"role": "system", "content": example.instruction}, {"role": "user", "content": example.text}]
        prompts.append(list(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)))
        answers.append([*tokenizer.encode(example.answer, add_special_tokens=False), tokenizer.eos_token_id])
    return prompts, answers


def _windows(model: Path) -> list[list[int]]:
    """Consecutive tokens of text that was not trained on."""
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(held_out_text(), add_special_tokens=False).ids
    starts = range(0, len(ids) - TEXT_WINDOW, max(TEXT_WINDOW, len(ids) // TEXT_WINDOWS))
    return [ids[start : start + TEXT_WINDOW] for start in starts]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS[1:], default=WEIGHTS[1:])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto")
    parser.add_argument("--n", type=int, default=200, help="held-out inputs of each task")
    parser.add_argument("--text-model", type=Path, help="directory of the text model; trained if it has none")
    parser.add_argument("--steps", type=int, default=TEXT_STEPS, help="training steps of the text model")
    parser.add_argument("--json", type=Path, help="write every number here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
