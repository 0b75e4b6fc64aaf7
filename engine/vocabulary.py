"""A model's vocabulary by its tokenizer, also of a model that another server runs and the engine could not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from farsight.engine.checkpoint.config_fields import read_json
from farsight.tokenization.gguf_file import is_gguf, read_gguf
from farsight.tokenization.gguf_texts import vocabulary_len
from farsight.tokenization.loading import load_tokenizer
from farsight.tokenization.text_stream import TextDecoder


def vocabulary_size(model_dir: Path) -> int:
    """Returns the vocabulary size by ``config.json``; without that file, and for a GGUF file, the number of tokens.

    Raises:
        InvalidValueError: neither can be read.
    """
    if is_gguf(model_dir):
        return vocabulary_len(read_gguf(model_dir))
    config = read_json(model_dir, "config.json") or {}
    size = config.get("vocab_size")
    return size if type(size) is int else load_tokenizer(model_dir).get_vocab_size()


class PromptDecoder:
    """Token ids to text; the tokenizer is loaded when it is first needed, which is rare."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir

    @cached_property
    def _decoder(self) -> TextDecoder:
        return TextDecoder(load_tokenizer(self._model_dir))

    def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Returns the text of tokens that follow those ``before``, without special tokens."""
        if not token_ids:
            return ""
        stream = self._decoder.start(before)
        return "".join([*map(stream.push, token_ids), stream.flush()])
