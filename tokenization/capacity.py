"""How much text a token can hold at most, so that a text that cannot fit is refused before it is tokenised.

A tokenizer may drop characters, join many into one token or replace them by one. The bound holds only for tokenizers
all of whose stages are known not to; for others there is none, and a text is measured by tokenising it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

_COMPOSED = 4
"""Most characters that a Unicode normalisation composes to one: a Greek letter and three marks."""

_KEEPING_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Prepend": 1}
_KEEPING_SPLITTERS = frozenset(("ByteLevel", "Metaspace", "Digits"))


@dataclass(frozen=True, slots=True)
class TextCapacity:
    """
    Attributes:
        chars_per_token: Most characters of a text that one token stands for.
        keeps_spaces: Whether white space always becomes tokens; else only other characters count.
    """

    chars_per_token: int
    keeps_spaces: bool

    def least_tokens(self, text: str) -> int:
        """No tokenisation of the text has fewer tokens."""
        num_chars = len(text) if self.keeps_spaces else sum(map(len, text.split()))
        return -(-num_chars // self.chars_per_token)


def text_capacity(tokenizer: Tokenizer) -> TextCapacity | None:
    """The bound; None if the tokenizer may make few tokens of any number of characters."""
    splitters = list(_stages(_settings(tokenizer.pre_tokenizer), "pretokenizers"))
    composed = 1
    for each in _stages(_settings(tokenizer.normalizer), "normalizers"):
        factor = _normalized(each)
        if factor is None:
            return None
        composed *= factor
    if not all(_keeps(each) for each in splitters) or not _knows_all(tokenizer, splitters):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    if not longest:
        return None
    return TextCapacity(longest * composed, not any(each.lstrip or each.rstrip for each in added))


def _settings(component: Any) -> dict[str, Any] | None:
    """Returns a part of a tokenizer as JSON: the whole holds the vocabulary too, and a large one takes seconds."""
    return None if component is None else json.loads(component.__getstate__())


def _stages(stage: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    if stage is None:
        return
    if stage["type"] != "Sequence":
        yield stage
        return
    for each in stage[name]:
        yield from _stages(each, name)


def _normalized(stage: dict[str, Any]) -> int | None:
    """Characters that the stage may turn into one; None if there is no bound."""
    if stage["type"] == "Replace":
        replaced = stage["pattern"].get("String")
        return 1 if replaced is not None and len(stage["content"]) >= len(replaced) else None
    return _KEEPING_NORMALIZERS.get(stage["type"])


def _keeps(stage: dict[str, Any]) -> bool:
    """Whether all characters reach the model."""
    if stage["type"] in ("Split", "Punctuation"):
        return bool(stage["behavior"] != "Removed")
    return stage["type"] in _KEEPING_SPLITTERS


def _knows_all(tokenizer: Tokenizer, splitters: list[dict[str, Any]]) -> bool:
    """Whether no character is dropped, and characters that the model does not know are not joined to one token."""
    model = tokenizer.model
    if isinstance(model, models.BPE) and any(each["type"] == "ByteLevel" for each in splitters):
        return all(model.token_to_id(char) is not None for char in pre_tokenizers.ByteLevel.alphabet())
    if isinstance(model, models.BPE):
        falls_back = bool(model.byte_fallback)
    else:  # of the others, Unigram alone has bytes
        falls_back = isinstance(model, models.Unigram) and bool(json.loads(model.__getstate__()).get("byte_fallback"))
    return falls_back and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
