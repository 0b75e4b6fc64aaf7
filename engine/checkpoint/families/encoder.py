"""Encoders: models that read a whole text at once and generate nothing. BERT and the families that share its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from farsight.engine.checkpoint.families.record import Evidence


@dataclass(frozen=True, slots=True)
class EncoderArchitecture:
    """One class of a ``config.json``.

    Attributes:
        defaults: Defaults of the fields of its ``config.json``, as in transformers.
        prefix: What may stand before the names of its tensors.
        evidence: What it has been compared with.
        after_padding: Positions count from behind the padding token's id, as in RoBERTa.
        classifier: How its scores are made of the first token's state: ``pooled`` goes through BERT's pooler, ``two``
            through the two layers of RoBERTa's head; empty if it makes embeddings.
        rotary: Queries and keys are turned by position, and there is no table of positions.
        qkv: Names of the matrices of queries, keys and values, or of a single one.
        up: Name of the MLP's first matrix; of two, where it is gated: ``down(act(gate) * up)``.
        biased: Whether linear layers add a bias.
        only_gguf: It is read from GGUF files alone: published directories have other names and a program of their own.
    """

    defaults: Mapping[str, Any]
    prefix: str
    evidence: Evidence
    after_padding: bool = False
    classifier: Literal["", "pooled", "two"] = ""
    rotary: bool = False
    qkv: tuple[str, ...] = ("query", "key", "value")
    up: tuple[str, ...] = ("intermediate.dense",)
    biased: bool = True
    only_gguf: bool = False


def _evidence(models: str) -> Evidence:
    return Evidence(models, test="encoders/test_encoders.py")


_BERT: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
}
_ROBERTA: Mapping[str, Any] = {**_BERT, "vocab_size": 50265, "pad_token_id": 1}
_XLM: Mapping[str, Any] = {**_ROBERTA, "vocab_size": 30522}

ENCODERS: Mapping[str, EncoderArchitecture] = {
    "BertModel": EncoderArchitecture(_BERT, "bert.", _evidence("all-MiniLM, LaBSE, BGE, E5")),
    "BertForSequenceClassification": EncoderArchitecture(
        _BERT, "bert.", _evidence("ms-marco-MiniLM cross-encoders"), classifier="pooled"
    ),
    "RobertaModel": EncoderArchitecture(_ROBERTA, "roberta.", _evidence("all-roberta"), after_padding=True),
    "RobertaForSequenceClassification": EncoderArchitecture(
        _ROBERTA, "roberta.", _evidence("RoBERTa cross-encoders"), after_padding=True, classifier="two"
    ),
    "XLMRobertaModel": EncoderArchitecture(_XLM, "roberta.", _evidence("BGE-M3, multilingual-E5"), after_padding=True),
    "XLMRobertaForSequenceClassification": EncoderArchitecture(
        _XLM, "roberta.", _evidence("BGE rerankers"), after_padding=True, classifier="two"
    ),
    "NomicBertModel": EncoderArchitecture(
        _BERT | {"hidden_act": "silu", "max_position_embeddings": 2048},
        "",
        Evidence("nomic-embed-text v1 and v1.5, in GGUF files", test="encoders/test_gguf_encoders.py"),
        rotary=True,
        qkv=("qkv",),
        up=("gate.dense", "intermediate.dense"),
        biased=False,
        only_gguf=True,
    ),
}
"""Encoders by their name in ``config.json``."""
