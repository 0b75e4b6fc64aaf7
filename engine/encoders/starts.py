"""Where the training of a regressor begins: with an encoder's weights, or with a small encoder of random ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import ForecastQuestion
from farsight.engine.checkpoint.config_fields import read_json
from farsight.engine.checkpoint.encoder_config import encoder_shapes
from farsight.engine.encoders.text_encoder import encoder_config
from farsight.engine.models.encoder import EncoderModel
from farsight.tokenization.loading import load_tokenizer

_WITH_A_LAYER = {
    "BertModel": "BertForSequenceClassification",
    "RobertaModel": "RobertaForSequenceClassification",
    "XLMRobertaModel": "XLMRobertaForSequenceClassification",
}
"""The class that is an encoder with one linear layer on top."""

_SPREAD = 0.02
"""Standard deviation of new weights, as BERT's."""

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

_SMALL: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "id2label": {"0": "output_len"},
}
"""A BERT that reads a request of a hundred tokens in a millisecond of a core."""

_VOCABULARY = 8192
"""Tokens, at most."""

_LETTERS = 1000
"""Letters in it, at most."""


def begin_with_weights(folder: Path, encoder: Path, seed: int) -> dict[str, Tensor]:
    """Writes configuration and tokenizer of an encoder with a new layer on top; returns its weights in float32.

    Raises:
        InvalidValueError: Field ``encoder``: it cannot be loaded, or has layers for scores already.
    """
    config = encoder_config(encoder)
    if config.architecture not in _WITH_A_LAYER:
        raise InvalidValueError("encoder", config.architecture, f"one of {', '.join(_WITH_A_LAYER)}")
    raw = read_json(encoder, "config.json") or {}
    raw |= {"architectures": [_WITH_A_LAYER[config.architecture]], "id2label": {"0": "output_len"}}
    raw.pop("num_labels", None)
    (folder / "config.json").write_text(json.dumps(raw))
    load_tokenizer(encoder).save(str(folder / "tokenizer.json"))
    known = EncoderModel.from_dir(encoder, config, torch.float32).weights
    new = _random_weights(folder, seed)
    return {name: known.get(name, tensor).clone() for name, tensor in new.items()}


def begin_with_nothing(folder: Path, questions: Sequence[ForecastQuestion], seed: int) -> dict[str, Tensor]:
    """Writes configuration and tokenizer of a small encoder; returns its random weights.

    Args:
        questions: Their words make the vocabulary.
    """
    tokenizer = _word_parts(questions)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**_SMALL, "vocab_size": tokenizer.get_vocab_size()}))
    return _random_weights(folder, seed)


def _random_weights(folder: Path, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator) for name, shape in encoder_shapes(encoder_config(folder)).items()}


def _random(name: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if name.endswith(".bias"):
        return torch.zeros(*shape)
    if ".LayerNorm." in name:
        return torch.ones(*shape)
    return _SPREAD * torch.randn(*shape, generator=generator)


def _word_parts(questions: Sequence[ForecastQuestion]) -> Tokenizer:
    """Makes a WordPiece tokenizer as BERT's, of whole words and letters. The library's own breaks ties by chance."""
    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in _texts(questions):
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    vocabulary = {token: number for number, token in enumerate(_tokens(words))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.add_special_tokens(list(_SPECIAL))
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return tokenizer


def _tokens(words: Counter[str]) -> list[str]:
    """Returns the vocabulary: special tokens, letters with and without a word before them, the most frequent words."""
    letters: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            letters[letter] += count
    tokens = [*_SPECIAL, *(form for letter in _most_frequent(letters)[:_LETTERS] for form in (letter, f"##{letter}"))]
    known = set(tokens)
    tokens += [word for word in _most_frequent(words) if word not in known]
    return tokens[:_VOCABULARY]


def _most_frequent(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda each: (-counts[each], each))


def _texts(questions: Sequence[ForecastQuestion]) -> Iterator[str]:
    yield from dict.fromkeys(each.instruction for each in questions)
    for each in questions:
        yield each.user_input
