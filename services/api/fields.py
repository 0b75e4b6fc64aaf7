"""What the fields of a request may hold: limits, expected values, and the fields of the OpenAI API that are refused.

An unsupported field is never ignored. It is refused unless it holds the value that means "not used", which some
clients send by default.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from farsight.core.errors import InvalidValueError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
"""Characters of one stop string. At every token, text that may begin a stop string is compared with all of them,
at a cost that grows with the square of its length."""

MAX_STOP_TOKEN_IDS = 1024
MAX_PROMPTS = 256
MAX_N = 128
MAX_LOGPROBS = 20
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256

MAX_SESSION_CHARS = 1024
MAX_APPLICATION_CHARS = 128

MAX_CHOICES = 1024
"""Texts of which an output must be one."""

MAX_SEQUENCES = 256
"""Most outputs that one request may run, over all its prompts."""

PROMPT = "a string, a list of strings, a list of token ids or a list of lists of token ids"
CONTENT = 'a string or a non-empty list of {"type": "text", "text": ...} parts'

MAX_PRIORITY = 2**31 - 1

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages that chat templates are made for."""

EXPECTED: dict[str, str] = {
    "": "a JSON object",
    "model": "the name of the served model, as a string",
    "prompt": PROMPT,
    "messages": "a non-empty list of messages",
    "messages.role": "'system', 'developer', 'user', 'assistant', 'tool', or another name that the chat template shows",
    "messages.tool_calls": "a list of calls, each with id, type 'function' and function, or 'custom' and custom",
    "messages.tool_calls.function.arguments": "a JSON object as text, in a string",
    "messages.tool_call_id": "the id of the call that this message answers, as a string",
    "tools": "a list of functions and custom tools",
    "tools.type": "'function' or 'custom'",
    "tools.function": "an object with name, description and parameters",
    "tools.function.name": "1 to 128 characters out of a-z, A-Z, 0-9, '_', '-' and '.'",
    "tools.custom": "an object with name, description and format",
    "tools.custom.name": "1 to 128 characters out of a-z, A-Z, 0-9, '_', '-' and '.'",
    "tools.function.parameters": "a JSON Schema of an object",
    "tool_choice": "'auto', 'none', 'required', or an object that names a tool or allowed_tools",
    "chat_template_kwargs": "an object of values that the chat template knows",
    "thinking_token_budget": "an integer >= 0",
    "messages.content": CONTENT,
    "max_tokens": "an integer >= 1",
    "min_tokens": "an integer >= 0",
    "max_completion_tokens": "an integer >= 1",
    "temperature": "a number from 0 to 2",
    "top_p": "a number > 0 and <= 1",
    "top_k": "an integer >= -1 (0 and -1 keep all tokens)",
    "min_p": "a number from 0 to 1",
    "repetition_penalty": "a number from 0.01 to 100 (1 changes nothing)",
    "presence_penalty": "a number from -2 to 2",
    "frequency_penalty": "a number from -2 to 2",
    "logit_bias": f"an object of up to {MAX_BIASES} token ids, each with a number from -100 to 100",
    "n": f"an integer from 1 to {MAX_N}",
    "best_of": f"an integer from 1 to {MAX_N}",
    "logprobs": f"an integer from 0 to {MAX_LOGPROBS} for a completion, true or false for a chat",
    "top_logprobs": f"an integer from 0 to {MAX_TOP_LOGPROBS}",
    "priority": f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}",
    "deadline_s": "a number of seconds > 0 and <= 86400",
    "slo": "an object with ttft and tpot, numbers of seconds",
    "slo.ttft": "a number of seconds > 0 and <= 86400",
    "slo.tpot": "a number of seconds > 0 and <= 86400",
    "cache_salt": "a string of 1 to 1024 characters",
    "prompt_cache_key": "a string of 1 to 1024 characters",
    "benchmark_len": "an integer >= 1",
    "seed": "an integer from 0 to 2**64 - 1, or -1 for any",
    "length_penalty": "a number from -10 to 10",
    "prompt_logprobs": f"an integer from 0 to {MAX_TOP_LOGPROBS}",
    "truncate_prompt_tokens": "an integer >= 1, or -1 for what the context takes",
    "allowed_token_ids": f"a list of 1 to {MAX_ALLOWED_TOKEN_IDS} token ids",
    "bad_words": f"a list of up to {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_CHARS} characters",
    "stop": f"a non-empty string of up to {MAX_STOP_CHARS} characters or a list of up to {MAX_STOP_STRINGS} of them",
    "stop_token_ids": f"a list of token ids, at most {MAX_STOP_TOKEN_IDS}",
    "stream_options": "an object and stream to be true",
    "response_format": "an object with type 'text', 'json_object', 'json_schema' or 'structural_tag'",
    "response_format.type": "'text', 'json_object', 'json_schema' or 'structural_tag'",
    "response_format.json_schema": "an object with 'schema'",
    "response_format.json_schema.schema": "a JSON Schema, as an object",
    "structured_outputs": "an object with one of json, json_object, regex, choice, grammar and structural_tag",
    "guided_json": "a JSON Schema, as an object or as its text",
    "guided_regex": "a non-empty regular expression, as a string",
    "guided_choice": f"a list of 1 to {MAX_CHOICES} strings",
    "guided_grammar": "a non-empty grammar in Lark or GBNF, as a string",
    "kind": "the name of a kind of component, as a string",
    "count": "an integer from 1 to 1000",
}
"""The expected value by field path, without list positions, where its type does not say it all (``errors``)."""

MAX_SHOWN_CHARS = 200
"""Characters of a client's text that an error shows, as ``InvalidValueError`` does of a value."""


def shown(text: str) -> str:
    """Shortens a client's text as errors show it."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


@dataclass(frozen=True, slots=True)
class NeutralOnly:
    """A field that Farsight does not support and accepts only with a neutral value.

    Attributes:
        neutral: Values that change nothing; ``null`` always counts as one.
        hint: What to do instead, as a clause.
        any: Whether no value changes anything.
    """

    neutral: tuple[Any, ...]
    hint: str
    any: bool = False

    def accepts(self, value: Any) -> bool:
        return self.any or value is None or any(_same(value, each) for each in self.neutral)

    @property
    def expected(self) -> str:
        shown = " or ".join(_json(value) for value in (*self.neutral, None))
        return f"{shown}: {self.hint}"


NO_EFFECT = NeutralOnly((), "", any=True)
"""A field that says something about a request, and nothing about its answer."""

COMMON_NEUTRAL: dict[str, NeutralOnly] = {
    "metadata": NO_EFFECT,
    "safety_identifier": NO_EFFECT,
    "verbosity": NO_EFFECT,
    "cache_control": NO_EFFECT,
    "request_id": NO_EFFECT,
    "guided_decoding_backend": NO_EFFECT,
    "prompt_cache_retention": NO_EFFECT,
    "store": NeutralOnly((False,), "answers are not stored"),
    "skip_special_tokens": NeutralOnly((True,), "texts hold no special tokens, return_token_ids shows them"),
    "spaces_between_special_tokens": NeutralOnly((True, False), "texts hold no special tokens"),
    "include_stop_str_in_output": NeutralOnly((False,), "an output ends before its stop string"),
    "early_stopping": NeutralOnly((False,), "a beam search ends where no output can be better than those found"),
    "guided_whitespace_pattern": NeutralOnly((), "white space between the tokens of JSON has one form"),
    "logits_processors": NeutralOnly(([],), "logits processors are not supported, logit_bias adds to logits"),
    "kv_transfer_params": NeutralOnly(({},), "the KV of a request stays on its replica"),
    "mm_processor_kwargs": NeutralOnly(({},), "only text is understood"),
    "detokenize": NeutralOnly((True,), "outputs are texts, return_token_ids adds their tokens"),
}
"""Fields of completions and chats."""

COMPLETION_NEUTRAL: dict[str, NeutralOnly] = {
    **COMMON_NEUTRAL,
    "prompt_embeds": NeutralOnly(([],), "prompts are texts or token ids"),
    "suffix": NeutralOnly(("",), "infilling before a suffix is not supported, put all text into the prompt"),
}

CHAT_NEUTRAL: dict[str, NeutralOnly] = {
    **COMMON_NEUTRAL,
    "best_of": NeutralOnly((1,), "n draws several outputs"),
    "chat_template": NeutralOnly(("",), "the model's own template is used, chat_template.jinja"),
    "documents": NeutralOnly(([],), "put the documents into a message"),
    "audio": NeutralOnly((), "only text can be generated"),
    "function_call": NeutralOnly(("none", "auto"), "use tool_choice"),
    "functions": NeutralOnly(([],), "use tools"),
    "modalities": NeutralOnly((["text"],), "only text can be generated"),
    "prediction": NeutralOnly((), "predicted outputs are not supported"),
    "web_search_options": NeutralOnly((), "web search is not supported"),
}

MESSAGE_NEUTRAL: dict[str, NeutralOnly] = {
    "annotations": NeutralOnly(([],), "only the text of earlier answers is used"),
    "audio": NeutralOnly((), "only text is understood"),
    "function_call": NeutralOnly((), "use tool_calls"),
    "refusal": NeutralOnly((), "put the text into content"),
}


def refused(suffix: str, got: Any, expected: str) -> PydanticCustomError:
    """Makes an error for use inside a validator.

    Args:
        suffix: The place inside the validated value, such as ``[3]`` or ``.tools``.
    """
    return PydanticCustomError("refused", "expected {expected}", {"suffix": suffix, "got": got, "expected": expected})


def checked_session(field: str, name: Any) -> str:
    """Returns the name of a session as its client wrote it; empty for none.

    Raises:
        InvalidValueError: It is no text, too long, or holds characters that do not print.
    """
    if not isinstance(name, str) or len(name) > MAX_SESSION_CHARS or not (name.isprintable() or not name):
        expected = f"a text of at most {MAX_SESSION_CHARS} printable characters"
        raise InvalidValueError(field, shown(str(name)), expected)
    return name


def needed(value: str | None, place: str, name: str) -> str:
    """Returns the text of a field that may not be missing here.

    Raises:
        InvalidValueError: It is missing.
    """
    if value is None:
        raise InvalidValueError(f"{place}.{name}", None, "a string")
    return value


def is_empty(value: Any) -> bool:
    """Tells whether a field says as little as one that is not there: null, false, or something without content."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _same(value: Any, neutral: Any) -> bool:
    """Compares JSON values: unlike in Python, ``true`` is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _json(value: Any) -> str:
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else repr(value).replace("'", '"')


def strip_neutral(
    data: Any, known: Iterable[str], neutral: Mapping[str, NeutralOnly], *, takes_unknown: bool = False
) -> Any:
    """Drops unsupported fields that hold a neutral value, and unknown ones that say nothing.

    Args:
        takes_unknown: Whether unknown fields are dropped whatever they hold, unless they look like a known one.

    Raises:
        PydanticCustomError: An unsupported field holds another value, or a field is unknown.
    """
    if not isinstance(data, dict):
        return data
    fields = set(known)
    kept = {}
    for name, value in data.items():
        if name in fields:
            kept[name] = value
        elif name not in neutral:
            if is_empty(value):
                continue
            if not takes_unknown or difflib.get_close_matches(name, fields):
                raise _unknown_field(name, fields)
        elif not neutral[name].accepts(value):
            raise refused(f".{name}", value, neutral[name].expected)
    return kept


def _unknown_field(name: str, fields: set[str]) -> PydanticCustomError:
    name = shown(name)
    close = difflib.get_close_matches(name, sorted(fields))
    # Prefer the match with the same beginning: max_completion_tokens means max_tokens rather than min_tokens.
    nearest = max(close, key=lambda each: _common_start(each, name), default=None)
    hint = f"did you mean {nearest!r}?" if nearest else f"the fields are {', '.join(sorted(fields))}"
    return PydanticCustomError("unknown_field", "unknown field; {hint}", {"suffix": f".{name}", "hint": hint})


def _common_start(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class StrictModel(BaseModel):
    """Base class of all objects in a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {}
    takes_unknown: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _strip_neutral(cls, data: Any) -> Any:
        names = [field.alias or name for name, field in cls.model_fields.items()]
        return strip_neutral(data, names, cls.neutral, takes_unknown=cls.takes_unknown)
