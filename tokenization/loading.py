"""The one way to load a tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from core.errors import InvalidValueError
from tokenization.gguf.file import is_gguf, read_gguf
from tokenization.gguf.texts import gguf_tokenizer
from tokenization.model_dir import model_file


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that gives every token of a text, and no other.

    ``tokenizer.json`` may carry a truncation and a padding from training; both are turned off.

    Args:
        path: A model directory with a ``tokenizer.json``, such a file, or a GGUF file.

    Raises:
        InvalidValueError: no such file, or one that cannot be read.
    """
    if is_gguf(path):
        return gguf_tokenizer(read_gguf(path))
    file = model_file(path, "tokenizer.json") if path.is_dir() else path
    if file is None or not file.is_file():
        raise InvalidValueError("model", str(path), "a model directory with a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidValueError("model", str(file), f"a readable tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
