"""The one way to load a tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from core.errors import InvalidValueError
from tokenization.bounds import MAX_BYTES, check_bounds, is_panic
from tokenization.gguf.file import is_gguf, read_gguf
from tokenization.gguf.texts import gguf_tokenizer
from tokenization.model_dir import model_file


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
