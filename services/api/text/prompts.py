"""From text and messages to token ids, without the weight of ``transformers``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from tokenizers import Tokenizer

from core.errors import ConfigError
from services.api.errors import ApiError
from services.api.text.templates import compile_template
from services.api.text.token_texts import TokenTexts

logger = logging.getLogger(__name__)


class PromptEncoder:
    """The tokenizer and the chat template of one model directory.

    Args:
        model_dir: Holds ``tokenizer.json`` and, for chat, a template in ``chat_template.jinja`` or in
            ``tokenizer_config.json``; the former wins, as in ``transformers``.

    Attributes:
        texts: What single tokens stand for.

    Raises:
        ConfigError: No usable tokenizer, or a template with wrong syntax.
    """

    def __init__(self, model_dir: str | Path) -> None:
        folder = Path(model_dir)
        self._tokenizer = _load_tokenizer(folder)
        self.texts = TokenTexts(self._tokenizer)
        config = _read_json(folder / "tokenizer_config.json")
        self._special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
        source = _template_source(folder, config)
        self._template = None if source is None else _compile(folder, source)
        self._knows_developer = source is not None and "developer" in source

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids with the special tokens that the tokenizer adds by itself."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids)))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of the rendered conversation; all special tokens come from the template.

        Raises:
            ApiError: As ``render_chat``.
        """
        return tuple(self._tokenizer.encode(self.render_chat(messages), add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as one text that ends where the assistant is to go on.

        A ``developer`` message is a ``system`` message to a template that does not know the word.

        Raises:
            ApiError: 400: there is no template, or it refuses these messages.
        """
        if self._template is None:
            message = "messages: the served model has no chat template; use /v1/completions with a prompt instead"
            raise ApiError(message, param="messages", code="no_chat_template")
        chat = [dict(message) | {"role": self._role(message["role"])} for message in messages]
        try:
            return self._template.render(
                messages=chat, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except TemplateError as error:
            reason = error.message or type(error).__name__
        except Exception as error:  # the template is a program of the model's author
            logger.warning("the chat template failed", exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        message = f"messages: the model's chat template refused them: {reason}"
        raise ApiError(message, param="messages", code="chat_template_error")

    def _role(self, role: str) -> str:
        return "system" if role == "developer" and not self._knows_developer else role


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise ConfigError("model", str(path), f"a readable tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("model", str(path), f"a JSON file ({error})") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like; each is a string or an object with ``content``."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _compile(folder: Path, source: str) -> Template:
    try:
        return compile_template(source)
    except TemplateError as error:
        raise ConfigError("model", str(folder), f"a chat template of valid Jinja ({error})") from error
