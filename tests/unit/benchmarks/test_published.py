"""Published weights beside the programs that know them: transformers in floats, llama.cpp on the same GGUF file.

What they compute is compared on the first 20,000 tokens of this documentation, whatever it says by now.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.gguf_agreement import Logits, compare, llama_logits
from benchmarks.weights_quality import RowLogits, token_losses
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from farsight.tokenization.loading import load_tokenizer
from tests.published import gemma3, smollm2, smollm2_floats

NUM_TOKENS = 20_000
WINDOW = 256
DOCS = Path(__file__).parents[3] / "docs"

pytestmark = pytest.mark.timeout(3600)


def windows(tokenizer: Tokenizer) -> list[list[int]]:
    """Rows of so many tokens together, each behind what the tokenizer puts before a text."""
    text = "\n\n".join(page.read_text("utf-8") for page in sorted(DOCS.glob("*.md")))
    begin = list(tokenizer.encode("").ids)
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    step = WINDOW - len(begin)
    return [[*begin, *ids[at : at + step]] for at in range(0, NUM_TOKENS, step)]


def perplexity(compute: Logits, rows: list[list[int]]) -> float:
    return math.exp(torch.cat([token_losses(row, compute(row)) for row in rows]).mean().item())


def in_transformers(folder: Path) -> Logits:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def compute(row: list[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([row])).logits[0, :-1]
        return logits

    return compute


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2_floats(tmp_path_factory)


def test_perplexity_in_floats_is_that_of_transformers(floats: Path) -> None:
    rows = windows(load_tokenizer(floats))
    expected = perplexity(in_transformers(floats), rows)
    assert perplexity(RowLogits(floats, "float32", "full", WINDOW), rows) == pytest.approx(expected, rel=0.005)


def test_greedy_tokens_in_floats_are_those_of_transformers(floats: Path) -> None:
    """64 tokens behind each of eight texts: one forward pass over them shows what transformers would have said."""
    compute = in_transformers(floats)
    engine = Engine(floats, dtype="float32", engine=EngineConfig(kv_memory="64MiB", num_threads=1))
    prompts = [row[1:33] for row in windows(engine.tokenizer)[:8]]
    for answer in engine.generate(prompts, SamplingParams(64, ignore_eos=True)):
        logits = compute([*answer.prompt_ids, *answer.token_ids])[len(answer.prompt_ids) - 1 :]
        assert tuple(logits.argmax(-1).tolist()) == answer.token_ids


@pytest.mark.parametrize("model", [smollm2, gemma3])
def test_a_gguf_file_means_what_it_means_to_llama_cpp(model: Callable[[], Path]) -> None:
    """Each program rounds activations in its own way, so that a token may differ where two are nearly as good."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: no llama.cpp to compare with")
    path = model()
    rows = windows(load_tokenizer(path))
    expected = perplexity(llama_logits(path, WINDOW), rows)
    assert perplexity(RowLogits(path, "float32", "full", WINDOW), rows) == pytest.approx(expected, rel=0.01)
    found = compare(path)
    assert found.same_ids == found.texts
    assert found.best >= 0.97 * found.tokens and found.furthest < 0.5
