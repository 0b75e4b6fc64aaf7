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
from transformers import AutoModelForCausalLM, PreTrainedModel

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
EOS_ID = 2
CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café €5 日本語 🙂", "stop and go, hello world"] * 4

SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "wide_heads": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "llama3": {
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "linear": {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "linear", "factor": 2.5}},
    "mistral": {"architecture": "MistralForCausalLM", "num_key_value_heads": 2, "sliding_window": 7},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "num_key_value_heads": 2},
    "qwen2_window": {
        "architecture": "Qwen2ForCausalLM",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {
        "architecture": "Qwen3ForCausalLM",
        "num_key_value_heads": 2,
        "head_dim": 48,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {
        "architecture": "Phi3ForCausalLM",
        "num_key_value_heads": 2,
        "sliding_window": 11,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
    },
    "opt": {"architecture": "OPTForCausalLM"},
    "opt_gelu": {
        "architecture": "OPTForCausalLM",
        "activation_function": "gelu",
        "enable_bias": False,
        "tie_word_embeddings": False,
        "_remove_final_layer_norm": True,
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
        elif "embed_positions" in name or name.endswith("wpe.weight"):
            parameter.normal_(0, 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.15)
    model.get_output_embeddings().weight.normal_(0, 0.5)


def load_reference(model_dir: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


NEAR_TIE = 1e-4
"""Where the reference's two best logits are closer than this, either token is right."""


def assert_greedy(reference: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> None:
    """The output is what ``generate`` of the reference gives, token by token (EOS does not end it)."""
    generate: Any = reference.generate  # transformers has no types for what a model mixes in
    generated = generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        min_new_tokens=len(output),
        max_new_tokens=len(output),
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = generated.sequences[0, len(prompt) :].tolist()
    assert len(expected) == len(output)
    for ours, theirs, logits in zip(output, expected, generated.logits, strict=True):
        if ours != theirs:
            best = logits[0].topk(2).values
            assert best[0] - best[1] < NEAR_TIE, f"{ours} instead of {theirs}"
            return
