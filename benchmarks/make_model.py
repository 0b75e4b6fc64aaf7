"""Makes a small checkpoint with random weights, offline: ``python -m benchmarks.make_model --out DIR``."""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.names import active_parameters, num_parameters

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 2048
SEED = 0
NUM_CORPUS_CHARS = 8_000_000
LOGIT_STD = 0.5
"""Wide enough that rounding does not decide which token is greedy."""

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}<s>{{ message['role'] }}: {{ message['content'] }}</s>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<s>assistant: {% endif -%}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama model, or of a Qwen3-MoE where it has experts; an expert is ``intermediate_size`` wide."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


PRESETS = {
    "tiny": Shape(hidden_size=256, intermediate_size=688, num_layers=4, num_heads=8, num_kv_heads=4),
    "medium": Shape(hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12, num_kv_heads=4),
    "large": Shape(hidden_size=1536, intermediate_size=4608, num_layers=20, num_heads=24, num_kv_heads=8),
    "experts": Shape(
        hidden_size=512,
        intermediate_size=256,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        num_experts=32,
        experts_per_token=4,
    ),
}


def main() -> None:
    """Writes the model and prints what it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    tokenizer = train_tokenizer()
    model = random_model(PRESETS[args.preset], tokenizer, getattr(torch, args.dtype))
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    config = load_model_config(args.out)
    facts = {"preset": args.preset, "dtype": args.dtype, "parameters": num_parameters(config)}
    facts |= {"active": active_parameters(config), "vocab": len(tokenizer)}
    print(json.dumps({"out": str(args.out), **facts}))


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the source text of Python's standard library."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    bos = (BOS, bpe.token_to_id(BOS))
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _corpus() -> Iterator[str]:
    num_chars = 0
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or num_chars > NUM_CORPUS_CHARS:
            continue
        text = path.read_text("utf-8", errors="ignore")
        num_chars += len(text)
        yield text


def random_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights for the same shape and dtype, always."""
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(SEED)
    model: Any = _with_experts(shape, sizes) if shape.num_experts else LlamaForCausalLM(LlamaConfig(**sizes))
    torch.nn.init.normal_(model.lm_head.weight, std=LOGIT_STD)
    return model.to(dtype).eval()


def _with_experts(shape: Shape, sizes: dict[str, Any]) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.experts_per_token,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, weights in model.named_parameters():
        if name.endswith("gate.weight"):  # zeros would send every token to the same experts
            torch.nn.init.normal_(weights, std=LOGIT_STD / shape.hidden_size**0.5)
    return model


if __name__ == "__main__":
    main()
