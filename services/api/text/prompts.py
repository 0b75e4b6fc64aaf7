"""From text and messages to token ids, without the weight of ``transformers``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from farsight.core.child_process import ChildLost
from farsight.core.config.engine import ModelConfig
from farsight.core.errors import CapacityError, ConfigError, InvalidValueError
from farsight.core.request import PromptSource
from farsight.services.api.errors import ApiError, unavailable
from farsight.services.api.fields import KNOWN_ROLES
from farsight.services.api.generation import Echo, PromptText
from farsight.services.api.pictures.content import text_of
from farsight.services.api.text.client_text import placed, spans_of
from farsight.services.api.text.dialect import Dialect, TokenTexts
from farsight.services.api.text.template_process import TemplateProcess, TemplateRefused, TemplateStopped
from farsight.tokenization.capacity import text_capacity
from farsight.tokenization.model_dir import read_text
from farsight.tokenization.model_files import load_model_texts
from farsight.tokenization.plain_text import EncodedText

MAX_WAITING_CHATS = 1024
"""Conversations that wait for the template; beyond it further ones get 429."""

_SAMPLE = ({"role": "user", "content": "hello"},)
"""What every template is tried with."""


def _template_of(settings: ModelConfig, own: str | None) -> str | None:
    """Returns the chat template that is used.

    Args:
        own: The model's.

    Raises:
        ConfigError: The file cannot be read.
    """
    if not settings.chat_template:
        return own
    try:
        return read_text(Path(settings.chat_template))
    except (OSError, InvalidValueError) as error:
        expected = f"a file with a chat template ({error})"
        raise ConfigError("model.chat_template", settings.chat_template, expected) from error


class ChatEnd(Enum):
    """Where a rendered conversation ends."""

    NEW_TURN = "the assistant's turn has begun"
    AFTER_MESSAGES = "the last message is complete"
    IN_FINAL_MESSAGE = "the output goes on with the last message"


class ChatPrompt(NamedTuple):
    """A conversation as a chat template takes it.

    Attributes:
        tools: Functions that the model may call; None for none.
        arguments: Further values that the template may know.
        image_text: What stands for a picture where the template takes texts alone.
    """

    messages: Sequence[Mapping[str, Any]]
    end: ChatEnd = ChatEnd.NEW_TURN
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = {}
    image_text: str = ""


class PromptEncoder:
    """The tokenizer and the chat template of one model directory.

    What clients write is plain text: it never becomes a control token, whatever it reads like.

    Args:
        model_dir: As ``tokenization.model_files`` reads it.
        settings: A chat template and a form of tool calls that are not as the directory says.

    Attributes:
        texts: What single tokens stand for.
        dialect: How the model writes tool calls and reasoning.
        template: Source of the chat template; empty if there is none.

    Raises:
        ConfigError: No usable tokenizer, a template with wrong syntax, or one that takes too much time or memory.
    """

    def __init__(self, model_dir: str | Path, settings: ModelConfig | None = None) -> None:
        folder = Path(model_dir)
        try:
            files = load_model_texts(folder)
        except InvalidValueError as error:
            raise ConfigError(error.field, error.value, error.expected) from error
        self._tokenizer = files.tokenizer
        self._encoder = files.encoder
        self.texts = TokenTexts(files.tokenizer)
        self._capacity = text_capacity(files.tokenizer)
        settings = settings or ModelConfig()
        source = _template_of(settings, files.template)
        self.template = source or ""
        self._template = None if source is None else _compile(folder, source, files.special_tokens)
        self._knows_developer = source is not None and "developer" in source
        self.dialect = Dialect(files.tokenizer, source or "", settings.tool_format)
        self._renderer = ThreadPoolExecutor(1, "chat-template")
        self._num_waiting = 0

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def encode_prompt(self, text: str, parse_special: bool = False, add_special_tokens: bool = True) -> EncodedText:
        """Token ids of a completion's prompt.

        Args:
            parse_special: Whether control tokens that the text names are meant as such.
            add_special_tokens: Whether the special tokens that the tokenizer adds by itself are among them.
        """
        client = () if parse_special else ((0, len(text)),)
        return self._encoder.encode(text, client, add_special_tokens=add_special_tokens)

    def encode_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int]:
        """Token ids of two texts that a model reads at once, and the index of the first token of the second."""
        before, between, behind = self._pair_frame
        ids = [self.encode_prompt(text, add_special_tokens=False).ids for text in (first, second)]
        head = before + ids[0] + between
        return head + ids[1] + behind, len(head)

    @cached_property
    def _pair_frame(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The tokens that the tokenizer puts before, between and behind two texts."""
        pair = self._tokenizer.encode("a", "b")
        frame: list[list[int]] = [[], [], []]
        last = 0
        for token_id, is_special, sequence in zip(pair.ids, pair.special_tokens_mask, pair.sequence_ids, strict=True):
            if not is_special and sequence is not None:
                last = sequence + 1
            elif is_special:
                frame[last].append(token_id)
        return tuple(frame[0]), tuple(frame[1]), tuple(frame[2])

    def word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Token ids of a text inside of an output: as it is, and behind a space."""
        found = [self.encode_prompt(text, add_special_tokens=False).ids for text in (word, f" {word.lstrip()}")]
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def least_tokens(self, text: str, enough: int) -> int:
        """A lower bound of the text's tokens, from its characters alone: nothing is tokenised.

        Args:
            enough: A text that may have fewer tokens than this is not looked at: 0 is returned.
        """
        capacity = self._capacity
        if capacity is None or len(text) <= (enough - 1) * capacity.chars_per_token:
            return 0
        return capacity.least_tokens(text)

    def echo(self, token_ids: Sequence[int]) -> Echo:
        """The text of a prompt of token ids, special tokens included: the client has put them there."""
        return Echo.of_tokens(self.texts.decoder, token_ids)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Token ids of what ``render_chat`` returned."""
        return self._encoder.encode(str.__str__(text), spans_of(text)).ids

    def render_chat(self, prompt: ChatPrompt) -> str:
        """The conversation as one text that ends where the assistant is to go on.

        A ``developer`` message is a ``system`` message to a template that does not know the word. ``spans_of`` tells
        which parts of the text are the client's.

        Raises:
            ApiError: 400: there is no template, or it refuses these messages.
        """
        if self._template is None:
            message = "messages: the served model has no chat template; use /v1/completions with a prompt instead"
            raise ApiError(message, param="messages", code="no_chat_template")
        try:
            text, spans = self._template.render(
                [self._chat_message(message) for message in prompt.messages],
                add_generation_prompt=prompt.end is ChatEnd.NEW_TURN,
                tools=prompt.tools,
                arguments=prompt.arguments,
                image_text=prompt.image_text,
            )
        except TemplateRefused as error:
            message = f"messages: the model's chat template refused them: {error}"
            raise ApiError(message, param="messages", code="chat_template_error") from error
        except ChildLost as error:
            raise unavailable(f"The chat template could not be rendered now: {error}.") from error
        _check_shown(prompt.messages, text)
        if prompt.end is ChatEnd.IN_FINAL_MESSAGE:
            cut = _end_of_final(text, text_of(prompt.messages[-1]["content"]))
            text, spans = text[:cut], tuple((begin, min(stop, cut)) for begin, stop in spans if begin < cut)
        return placed(text, spans) if spans else text

    async def render_chat_soon(self, prompt: ChatPrompt) -> str:
        """``render_chat`` in a thread of its own: one that has to be stopped holds up other chats alone.

        Raises:
            CapacityError: Too many wait.
        """
        if self._num_waiting >= MAX_WAITING_CHATS:
            raise CapacityError(f"chats that wait for the template: {self._num_waiting}", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._renderer, self.render_chat, prompt)
        finally:
            self._num_waiting -= 1

    def _chat_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        role = message["role"]
        return {**message, "role": "system"} if role == "developer" and not self._knows_developer else message


def _check_shown(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raises ApiError (400) for a message that the template has dropped, as many do that do not know its role."""
    for index, message in enumerate(messages):
        if message["role"] not in KNOWN_ROLES and text_of(message["content"]).strip() not in text:
            field = f"messages[{index}].role"
            expected = f"one of {', '.join(KNOWN_ROLES)}: the model's chat template shows no other"
            raise ApiError(f"{field}: got {message['role']!r}, expected {expected}", param=field, code="invalid_value")


def _end_of_final(text: str, content: str) -> int:
    """Where the last message ends in the rendered text; templates may strip it.

    Raises:
        ApiError: 400: it is empty, or the template does not show it.
    """
    for shown in (content, content.strip()):
        begin = text.rfind(shown) if shown else -1
        if begin >= 0:
            return begin + len(shown)
    message = "continue_final_message: got true, expected a last message whose text the chat template shows"
    raise ApiError(message, param="continue_final_message", code="invalid_value")


def _compile(folder: Path, source: str, special_tokens: Mapping[str, str]) -> TemplateProcess:
    try:
        template = TemplateProcess(source, special_tokens)
    except TemplateRefused as error:
        raise ConfigError("model", str(folder), f"a chat template of valid Jinja ({error})") from error
    try:
        template.render(_SAMPLE)
    except TemplateStopped as error:
        raise ConfigError("model", str(folder), f"a chat template that renders one message ({error})") from error
    except TemplateRefused:
        pass  # it may want another conversation
    return template


def of_chat(messages: Sequence[Mapping[str, Any]]) -> PromptText:
    """A conversation without a user is all instruction."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    texts = [text_of(message["content"]) for message in messages]
    others = [text for i, text in enumerate(texts) if i != last]
    source = PromptSource(
        messages=tuple((message["role"], text) for message, text in zip(messages, texts, strict=True))
    )
    return PromptText("\n".join(others), "" if last is None else texts[last], source)


def of_completion(prompt: str, instruction: str | None) -> PromptText:
    """An instruction that the prompt begins with is not its user input as well; one of a single line is all input."""
    source = PromptSource(prompt)
    if instruction is not None:
        return PromptText(instruction, prompt.removeprefix(instruction).lstrip(), source)
    first, line_end, rest = prompt.partition("\n")
    return PromptText(first, rest, source) if line_end else PromptText("", prompt, source)
