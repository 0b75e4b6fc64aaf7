"""How much text a token can hold at most, so that a text that cannot fit is refused before it is tokenised.

A tokenizer may drop characters, join many into one token or replace them by one. The bound holds only for tokenizers
all of whose stages are known not to; for others there is none, and a text is measured by tokenising it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

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
    settings = json.loads(tokenizer.to_str())
    model = settings["model"]
    splitters = list(_stages(settings["pre_tokenizer"], "pretokenizers"))
    normalizers = list(_stages(settings["normalizer"], "normalizers"))
    composed = 1
    for each in normalizers:
        factor = _normalized(each)
        if factor is None:
            return None
        composed *= factor
    if not all(_keeps(each) for each in splitters) or not _knows_all(model, splitters):
        return None
    added = settings["added_tokens"]
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    if not longest:
        return None
    return TextCapacity(longest * composed, not any(each["lstrip"] or each["rstrip"] for each in added))


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


def _knows_all(model: dict[str, Any], splitters: list[dict[str, Any]]) -> bool:
    """Whether no character is dropped, and characters that the model does not know are not joined to one token."""
    if model["type"] != "BPE":
        return bool(model["type"] == "Unigram" and model.get("byte_fallback") and _has_byte_tokens(model))
    if any(each["type"] == "ByteLevel" for each in splitters):
        return set(pre_tokenizers.ByteLevel.alphabet()) <= set(model["vocab"])
    return bool(model.get("byte_fallback")) and _has_byte_tokens(model)


def _has_byte_tokens(model: dict[str, Any]) -> bool:
    vocab = model["vocab"]
    known = set(vocab) if isinstance(vocab, dict) else {token for token, _ in vocab}
    return all(f"<0x{byte:02X}>" in known for byte in range(256))
