"""The text files of a model directory: tokenizer, names of special tokens, chat template; which tokens control."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from farsight.tokenization.gguf_file import GGUFFile, is_gguf, read_gguf
from farsight.tokenization.gguf_texts import gguf_special_tokens, gguf_templates, gguf_tokenizer
from farsight.tokenization.loading import load_tokenizer
from farsight.tokenization.model_dir import model_file, read_json_file, read_text
from farsight.tokenization.plain_text import PlainTextEncoder

_MARKER = re.compile(r"[<\[{].+[>\]}]", re.DOTALL)
"""The form of markers that many tokenizers do not declare special, such as ``<think>`` and ``<|fim_prefix|>``."""

_HTML = re.compile(
    "</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|span|strong|sub|sup|table|tbody|td|tfoot|th"
    "|thead|tr|u|ul)>"
)
"""Added tokens that stand for ordinary text in the form of markers, as Gemma has them."""


def control_ids(tokenizer: Tokenizer, named: Collection[str] = (), templates: Iterable[str] = ()) -> frozenset[int]:
    """Ids of the control tokens among the added tokens.

    They are the special ones, those that a configuration names or a chat template writes, and all that have the form
    of a marker. What is left is text in one token: runs of spaces, HTML tags, words.

    Args:
        named: Texts of tokens with a role, such as ``eos_token`` of ``tokenizer_config.json``.
        templates: Sources of the chat templates.
    """
    sources = list(templates)
    found = set()
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        text = token.content
        is_marker = _MARKER.fullmatch(text) is not None and _HTML.fullmatch(text) is None
        is_word = not text.strip("\u2581").strip() or text.isalnum()
        is_written = not is_word and any(text in source for source in sources)
        if token.special or text in named or is_marker or is_written:
            found.add(token_id)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """
    Attributes:
        encoder: Encodes prompts; text from clients stays plain text.
        special_tokens: Texts of tokens with a role, such as ``bos_token``.
        template: Source of the chat template; None if there is none.
    """

    tokenizer: Tokenizer
    encoder: PlainTextEncoder
    special_tokens: dict[str, str]
    template: str | None


def load_model_texts(folder: Path) -> ModelTexts:
    """
    Args:
        folder: Holds ``tokenizer.json`` and, for chat, a template in ``chat_template.jinja`` or in
            ``tokenizer_config.json``; the former wins, as in ``transformers``. Or a GGUF file, which holds both.

    Raises:
        InvalidValueError: No usable tokenizer, or a file beside it cannot be read.
    """
    if is_gguf(folder):
        return _gguf_texts(read_gguf(folder))
    tokenizer = load_tokenizer(folder)
    config = _read_json(folder, "tokenizer_config.json")
    special_tokens = _special_tokens({**_read_json(folder, "special_tokens_map.json"), **config})
    return _model_texts(tokenizer, special_tokens, _templates(folder, config))


def _gguf_texts(file: GGUFFile) -> ModelTexts:
    return _model_texts(gguf_tokenizer(file), gguf_special_tokens(file), gguf_templates(file))


def _model_texts(tokenizer: Tokenizer, special_tokens: dict[str, str], templates: dict[str, str]) -> ModelTexts:
    control = control_ids(tokenizer, set(special_tokens.values()), templates.values())
    return ModelTexts(tokenizer, PlainTextEncoder(tokenizer, control), special_tokens, templates.get("default"))


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = model_file(folder, name)
    value = {} if path is None else read_json_file(path)
    return value if isinstance(value, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like; each is a string or an object with ``content``."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Sources by name; the one for plain chats is ``default``."""
    found = config.get("chat_template")
    if isinstance(found, list):
        templates = {entry["name"]: entry["template"] for entry in found if _is_named_template(entry)}
    else:
        templates = {"default": found} if isinstance(found, str) else {}
    path = model_file(folder, "chat_template.jinja")
    if path is not None:
        templates["default"] = read_text(path)
    return templates


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
