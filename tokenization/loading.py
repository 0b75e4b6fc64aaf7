"""The one way to load a tokenizer, and what one from elsewhere may do to a text: ``tokenizer.json`` is a small program.

Its normalizers, pre-tokenizers and decoders replace texts by others, in any number of steps: forty that each turn one
character into two make a terabyte of one. Its regular expressions may take for ever; the library's own limit of tries
ends those, by an exception that is no ``Exception``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from farsight.core.errors import InvalidValueError
from farsight.tokenization.gguf_file import is_gguf, read_gguf
from farsight.tokenization.gguf_texts import gguf_tokenizer
from farsight.tokenization.model_dir import model_file


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that gives every token of a text, and no other.

    ``tokenizer.json`` may carry a truncation and a padding from training; both are turned off.

    Args:
        path: A model directory with a ``tokenizer.json``, such a file, or a GGUF file.

    Raises:
        InvalidValueError: no such file, one that cannot be read, or one that makes too much of a text.
    """
    if is_gguf(path):
        return gguf_tokenizer(read_gguf(path))
    file = model_file(path, "tokenizer.json") if path.is_dir() else path
    if file is None or not file.is_file():
        raise InvalidValueError("model", str(path), "a model directory with a tokenizer.json")
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise InvalidValueError("model", f"{file}: {size} bytes", f"a tokenizer.json of at most {MAX_BYTES} bytes")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:  # the library raises nothing narrower
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise InvalidValueError("model", str(file), f"a readable tokenizer.json ({error})") from error
    check_bounds(tokenizer, file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


MAX_BYTES = 1 << 28
"""Longest ``tokenizer.json``; the longest real ones have some 40 MB."""

MAX_GROWTH = 64
"""Most characters that one character may become, by all steps in a row; real tokenizers make 1 to 4 of it."""

MAX_STEPS = 64
"""Normalizers, pre-tokenizers or decoders in a row."""

_MAX_ADDED = 1024
"""Longest text that a step, or a model, puts before or behind another."""

_LISTS = ("normalizers", "pretokenizers", "decoders")


def is_panic(error: BaseException) -> bool:
    """Whether the tokenizer's library has given up on a text: a regular expression that tries too much, a defect."""
    return type(error).__name__ == "PanicException"


def check_bounds(tokenizer: Tokenizer, file: Path) -> None:
    """
    Raises:
        InvalidValueError: The tokenizer would make much more of a text than it is.
    """
    for kind in ("normalizer", "pre_tokenizer", "decoder"):
        component = getattr(tokenizer, kind)
        steps = [] if component is None else list(_steps(json.loads(component.__getstate__())))
        growth = 1
        for step in steps:
            growth *= _growth(step)
            _check(len(str(step.get("prepend", ""))) <= _MAX_ADDED, file, kind, "a long text before each text")
        _check(len(steps) <= MAX_STEPS, file, kind, f"{len(steps)} steps, at most {MAX_STEPS} are taken")
        _check(growth <= MAX_GROWTH, file, kind, f"up to {growth} characters for one, at most {MAX_GROWTH} are taken")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        added = getattr(tokenizer.model, name, None) or ""
        _check(len(added) <= _MAX_ADDED, file, "model", f"a {name} of {len(added)} characters")


def _check(holds: bool, file: Path, kind: str, found: str) -> None:
    if not holds:
        raise InvalidValueError("model", f"{file}: {kind}", f"a tokenizer that keeps texts in bounds (it has {found})")


def _steps(component: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A component, or those that it is made of; the library's reader bounds how deep they are."""
    parts = next((component[name] for name in _LISTS if isinstance(component.get(name), list)), None)
    if parts is None:
        yield component
        return
    for part in parts:
        yield from _steps(part)


def _growth(step: dict[str, Any]) -> int:
    match step.get("type"):
        case "Replace":
            replaced = next(iter(step["pattern"].values()), "") if "String" in step["pattern"] else "?"
            return max(1, -(-len(step["content"]) // max(1, len(replaced))))
        case "ByteLevel":
            return 2  # a byte becomes a character, and most of those have two bytes
        case "Precompiled":
            return max(1, _longest_mapped(step["precompiled_charsmap"]))
    return 1


def _longest_mapped(charsmap: str) -> int:
    """Longest text of a table of sentencepiece: the length of a trie, the trie, texts that end with a zero."""
    table = base64.b64decode(charsmap)
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=0)
