"""Whether llama.cpp reads the same GGUF file as Farsight does, and whose rounding of activations costs more.

    python -m benchmarks.gguf_agreement FILE.gguf [FILE.gguf ...]
    python -m benchmarks.gguf_agreement FILE.gguf --rounding [--tokens 50000] [--prompts 60]

Needs ``llama-cpp-python``, which is no dependency: install it from PyPI (it is compiled for minutes). Both compute in
float32 where the file allows; llama.cpp rounds activations where the weights are quantised, so a token may differ where
two are nearly as good: the report gives how far the other token's logit is below the best.

With ``--rounding``, on the same tokens for all: the perplexity of articles, and how many greedy answers are those of
the same weights in floats. One forward pass over an answer finds the first token at which another computation would
have gone on differently. The reference is ``--weights float``, which is itself compared with transformers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.weights_quality import RowLogits, token_losses
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from farsight.services.bench.report import markdown_table
from farsight.simulator.traffic.traces import find_data

TEXTS = (
    "hello world", " Hello  World ", "naïve café 日本語 🙂", "12345 + 67 = ?", "if (x != 0) {\n\treturn y;\n}\n",
    "I'll we're THEY'VE", "the quick brown fox jumps over the lazy dog", "<s> is plain text here",
)  # fmt: skip
NUM_TOKENS = 24
ANSWER_LEN = 64
WINDOW = 512
NUM_THREADS = 2

Logits = Callable[[list[int]], Tensor]
"""The logits behind every token of a row but its last, shape (tokens - 1, vocabulary)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rounding", action="store_true", help="compare what the rounding of activations costs")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--prompts", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    for path in args.files:
        if args.rounding:
            text, prompts = "\n\n".join(articles()), instructions(args.prompts)
            print(f"{path.name}: {rounding(path, text, prompts, args.tokens)}")
            continue
        print(f"{path.name}: {compare(path)}")


@dataclass(slots=True)
class Agreement:
    """What llama.cpp makes of ``TEXTS`` and of our greedy outputs behind them.

    Attributes:
        texts: Their number.
        same_ids: Texts with the same ids.
        same_outputs: Outputs that llama.cpp would have given.
        tokens: Tokens of all outputs.
        best: Those that are the best to llama.cpp too, behind the same tokens.
        furthest: How far below the best logit another one of them is at most.
    """

    texts: int = 0
    same_ids: int = 0
    same_outputs: int = 0
    tokens: int = 0
    best: int = 0
    furthest: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.same_ids} of {self.texts} texts have the same ids, {self.same_outputs} of {self.texts} greedy"
            f" outputs of {NUM_TOKENS} tokens are the same; {self.best} of {self.tokens} tokens"
            f" ({100 * self.best / self.tokens:.1f} %) are llama.cpp's best behind the same tokens,"
            f" the furthest {self.furthest:.3g} below its best logit"
        )


def compare(path: Path) -> Agreement:
    """Compares ids and outputs: one forward pass over an output shows at each token what llama.cpp would have said."""
    llama = _llama(path, 256)
    logits_of = _llama_logits(llama)
    engine = _engine(path, 256, "full")
    found = Agreement()
    for text, output in zip(
        TEXTS, engine.generate(list(TEXTS), SamplingParams(NUM_TOKENS, ignore_eos=True)), strict=True
    ):
        logits = logits_of([*output.prompt_ids, *output.token_ids])[len(output.prompt_ids) - 1 :]
        below = logits.amax(-1) - logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        num_best = int((below == 0).sum())
        found.texts += 1
        found.same_ids += llama.tokenize(text.encode(), add_bos=True, special=False) == list(output.prompt_ids)
        found.same_outputs += num_best == NUM_TOKENS
        found.tokens += NUM_TOKENS
        found.best += num_best
        found.furthest = max(found.furthest, float(below.max()))
    return found


def llama_logits(path: Path, longest: int) -> Logits:
    """Returns what computes rows of at most so many tokens in llama.cpp."""
    return _llama_logits(_llama(path, longest))


def _llama(path: Path, longest: int) -> Any:
    import llama_cpp

    return llama_cpp.Llama(str(path), n_ctx=longest, n_threads=NUM_THREADS, verbose=False, logits_all=True)


def _engine(path: Path, longest: int, weights: str) -> Engine:
    config = EngineConfig(kv_memory="256MiB", num_threads=NUM_THREADS, max_model_len=longest, weights=weights)
    return Engine(path, dtype="float32", engine=config)


@dataclass(slots=True)
class Cost:
    """What one way of computing makes of the same tokens, beside floats."""

    losses: list[Tensor] = field(default_factory=list)
    num_same: int = 0
    divergence: float = 0.0
    prefixes: list[int] = field(default_factory=list)
    num_whole: int = 0

    def take(self, row: list[int], logits: Tensor, exact: Tensor) -> None:
        """A window of text; logits have shape (tokens - 1, vocabulary)."""
        self.losses.append(token_losses(row, logits))
        self.num_same += int((logits.argmax(-1) == exact.argmax(-1)).sum())
        ours, theirs = logits.log_softmax(-1), exact.log_softmax(-1)
        self.divergence += float((theirs.exp() * (theirs - ours)).sum())

    def cells(self) -> list[str]:
        if not self.losses:
            return ["-", "-", "-", *self._answers()]
        losses = torch.cat(self.losses)
        return [
            f"{math.exp(losses.mean().item()):.3f}",
            f"{100 * self.num_same / len(losses):.2f} %",
            f"{self.divergence / len(losses):.5f}",
            *self._answers(),
        ]

    def _answers(self) -> list[str]:
        if not self.prefixes:
            return ["-", "-"]
        mean = sum(self.prefixes) / len(self.prefixes)
        return [f"{self.num_whole} of {len(self.prefixes)}", f"{mean:.1f}"]


def rounding(path: Path, text: str, prompts: Sequence[str], num_tokens: int) -> str:
    """A table with a row for each way of computing."""
    longest = 2 * WINDOW
    engine = _engine(path, longest, "float")
    ids = list(engine.tokenizer.encode(text, add_special_tokens=False).ids)
    windows = [ids[at : at + WINDOW] for at in range(0, num_tokens, WINDOW)]
    asked = [prompt for prompt in prompts if len(engine.tokenizer.encode(prompt).ids) < WINDOW]
    answers = [
        (list(each.prompt_ids), list(each.token_ids)) for each in engine.generate(asked, SamplingParams(ANSWER_LEN))
    ]
    exact = RowLogits(path, "float32", "float", longest)
    ways: dict[str, Logits] = {
        "llama.cpp": llama_logits(path, longest),
        "ours, rounded": RowLogits(path, "float32", "full", longest),
        "ours, floats": exact,
    }
    costs = {name: Cost() for name in (*ways, "transformers")}
    for number, row in enumerate(windows):
        reference = exact(row)
        _progress(number, len(windows), costs)
        for name, way in ways.items():
            costs[name].take(row, reference if way is exact else way(row), reference)
    if answers:
        ways["transformers"] = _transformers_logits(path)
    for name, way in ways.items():
        for prompt, answer in answers:
            prefix = _common_prefix(way, prompt, answer)
            costs[name].prefixes.append(prefix)
            costs[name].num_whole += prefix == len(answer)
    length = sum(len(answer) for _, answer in answers) / max(1, len(answers))
    columns = ["", "perplexity", "same likeliest token", "divergence (nats)", "whole answers", "tokens till another"]
    scored = sum(len(row) - 1 for row in windows)
    return f"{scored:,} tokens scored, {len(answers)} answers of {length:.1f} tokens in the mean\n" + markdown_table(
        columns, [[name, *cost.cells()] for name, cost in costs.items()]
    )


def _progress(number: int, num: int, costs: Mapping[str, Cost]) -> None:
    if number and number % 10 == 0:
        print(
            f"{number} of {num} windows: { ({name: cost.cells()[0] for name, cost in costs.items()}) }", file=sys.stderr
        )


def _common_prefix(way: Logits, prompt: list[int], answer: list[int]) -> int:
    likeliest = way([*prompt, *answer])[len(prompt) - 1 :].argmax(-1).tolist()
    return next(
        (at for at, (one, other) in enumerate(zip(likeliest, answer, strict=True)) if one != other), len(answer)
    )


def _llama_logits(llama: Any) -> Logits:
    def compute(row: list[int]) -> Tensor:
        llama.reset()
        llama.eval(row)
        return torch.tensor(llama.scores[: len(row) - 1])

    return compute


def _transformers_logits(path: Path) -> Logits:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    @torch.inference_mode()
    def compute(row: list[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([row])).logits[0, :-1]
        return logits

    return compute


def articles() -> Iterator[str]:
    """Long texts in English: those of LooGLE, from Wikipedia."""
    with gzip.open(find_data("prefix_groups.jsonl.gz"), "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row["workload"] == "loogle":
                yield row["prefix"]


def instructions(num: int) -> list[str]:
    """The first of Stanford Alpaca, as a chat of this form of template."""
    found = []
    with gzip.open(find_data("alpaca.jsonl.gz"), "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            text = "\n".join(filter(None, (row["instruction"], row["user_input"])))
            found.append(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
            if len(found) == num:
                break
    return found


if __name__ == "__main__":
    main()
