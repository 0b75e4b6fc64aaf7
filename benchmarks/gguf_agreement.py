"""Whether llama.cpp reads the same GGUF file as Farsight does: token ids of texts, and greedy outputs.

    python -m benchmarks.gguf_agreement FILE.gguf [FILE.gguf ...]

Needs ``llama-cpp-python``, which is no dependency: install it from PyPI (it is compiled for minutes). Both compute in
float32 where the file allows; llama.cpp rounds activations where the weights are quantised, so a token may differ where
two are nearly as good: the report gives how far the other token's logit is below the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from core.config.engine import EngineConfig
from core.request import SamplingParams
from engine import Engine

TEXTS = (
    "hello world", " Hello  World ", "naïve café 日本語 🙂", "12345 + 67 = ?", "if (x != 0) {\n\treturn y;\n}\n",
    "I'll we're THEY'VE", "the quick brown fox jumps over the lazy dog", "<s> is plain text here",
)  # fmt: skip
NUM_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        same_ids, same_tokens, margins = compare(path)
        worst = f", furthest {max(margins):.3g} below the best logit" if margins else ""
        print(
            f"{path.name}: {same_ids} of {len(TEXTS)} texts have the same ids,"
            f" {same_tokens} of {len(TEXTS)} greedy outputs of {NUM_TOKENS} tokens are the same{worst}"
        )


def compare(path: Path) -> tuple[int, int, list[float]]:
    """Texts with the same ids, prompts with the same output, and how far first other tokens are below the best."""
    import llama_cpp

    llama = llama_cpp.Llama(str(path), n_ctx=256, n_threads=2, verbose=False, logits_all=True)
    engine = Engine(path, dtype="float32", engine=EngineConfig(kv_memory="64MiB", num_threads=2, max_model_len=256))
    ours = engine.generate(list(TEXTS), SamplingParams(NUM_TOKENS, ignore_eos=True))
    same_ids = same_tokens = 0
    margins = []
    for text, completion in zip(TEXTS, ours, strict=True):
        same_ids += llama.tokenize(text.encode(), add_bos=True, special=False) == list(completion.prompt_ids)
        theirs, logits = _greedy(llama, completion.prompt_ids)
        same_tokens += theirs == completion.token_ids
        margins += _first_margin(theirs, completion.token_ids, logits)
    return same_ids, same_tokens, margins


def _greedy(llama: Any, prompt: Sequence[int]) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    llama.reset()
    llama.eval(list(prompt))
    tokens, logits = [], []
    for _ in range(NUM_TOKENS):
        row = torch.tensor(llama.scores[llama.n_tokens - 1])
        tokens.append(int(row.argmax()))
        logits.append(row)
        llama.eval([tokens[-1]])
    return tuple(tokens), logits


def _first_margin(theirs: Sequence[int], ours: Sequence[int], logits: Sequence[torch.Tensor]) -> list[float]:
    """How far the first token of ours that differs is below llama.cpp's best; nothing where none differs."""
    for their, our, row in zip(theirs, ours, logits, strict=True):
        if their != our:
            return [float(row.max() - row[our])]
    return []


if __name__ == "__main__":
    main()
