"""Tiny random checkpoints of every architecture with a byte-level tokenizer, as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
EOS_ID = 2
CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café €5 日本語 🙂", "stop and go, hello world"] * 4

GROUPED = {"num_key_value_heads": 2}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}

SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa": GROUPED,
    "mqa": {"num_key_value_heads": 1},
    "tied": GROUPED | {"tie_word_embeddings": True},
    "wide_heads": GROUPED | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "biases": GROUPED | {"attention_bias": True, "mlp_bias": True},
    "llama3": GROUPED | {"rope_parameters": LLAMA3},
    "linear": GROUPED | {"rope_parameters": {"rope_type": "linear", "factor": 2.5}},
    "mistral": {"architecture": "MistralForCausalLM", **GROUPED, "sliding_window": 7},
    "qwen2": {"architecture": "Qwen2ForCausalLM", **GROUPED},
    "qwen2_window": {
        **{"architecture": "Qwen2ForCausalLM", **GROUPED},
        **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    },
    "qwen3": {
        **{"architecture": "Qwen3ForCausalLM", **GROUPED, "head_dim": 48, "num_hidden_layers": 3},
        **{"attention_bias": True, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {
        **{"architecture": "Phi3ForCausalLM", **GROUPED, "sliding_window": 11},
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
    },
    "opt": {"architecture": "OPTForCausalLM"},
    "opt_gelu": {
        **{"architecture": "OPTForCausalLM", "activation_function": "gelu", "enable_bias": False},
        **{"tie_word_embeddings": False, "_remove_final_layer_norm": True},
    },
}


def byte_level_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """Every byte is a token, and some merges; special tokens first."""
    tokenizer = Tokenizer(BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save_model(
    out: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "50GB",
    chat_template: str | None = None,
    **shape: Any,
) -> Path:
    """Makes a model of random weights whose logits are spread out, so that rounding does not decide argmax."""
    tokenizer = byte_level_tokenizer()
    model_class = getattr(transformers, architecture)
    sizes = {
        "hidden_size": 64,
        "ffn_dim" if architecture == "OPTForCausalLM" else "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS_ID}
    config = model_class.config_class(vocab_size=tokenizer.get_vocab_size(), **sizes | special | shape)
    torch.manual_seed(seed)
    model = model_class(config)
    randomize(model)
    model.to(dtype).save_pretrained(out, max_shard_size=max_shard_size)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": chat_template}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return out


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
            parameter.normal_(1.0, 0.2)  # ones would hide a norm that forgets its weight
        elif "layers" in name or ".h." in name or name.endswith("bias"):
            parameter.normal_(0, 0.15)
        elif "per_layer" in name:
            parameter.normal_(0, 0.3)
        elif "embed_positions" in name or name.endswith("wpe.weight"):
            parameter.normal_(0, 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(0, 0.15)
        elif name.endswith("layer_scalar"):
            buffer.normal_(1.0, 0.2)
    model.get_output_embeddings().weight.normal_(0, 0.5)


def load_reference(model_dir: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


NEAR_TIE = 1e-4
"""Where the reference's two best logits are closer than this, either token is right."""


def assert_best(logits: Tensor, output: Sequence[int], margin: float = NEAR_TIE) -> None:
    """Each token is the likeliest one by the reference's logits behind what comes before it, or as likely but for
    rounding; ``[tokens, vocab]``."""
    ours = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    behind = logits.max(-1).values - ours
    assert bool((behind < margin).all()), f"{behind.tolist()} behind the likeliest token"


@torch.no_grad()
def assert_greedy(
    reference: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], margin: float = NEAR_TIE
) -> None:
    """The output is what a model of transformers says greedily (EOS does not end it)."""
    model: Any = reference  # transformers has no types for what a model mixes in
    assert_best(model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float(), output, margin)
