"""From what clients write (a JSON Schema, an expression, choices, a grammar) to the one form that is compiled.

The form is that of ``llguidance``: a JSON text that names the grammar. It needs no tokenizer, so a
request carries it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from farsight.tokenization.grammars.problems import GrammarRefused, plain
from farsight.tokenization.grammars.rewriting import as_text, rewritten

MAX_SOURCE_CHARS = 64 * 1024
"""Characters of a grammar as its client writes it."""

WHITESPACE = r"( |\n {0,20})?"
"""Between the tokens of a JSON text: a space, or a line break and an indent. It has a bound, since a model that writes
nothing but spaces would never end."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of ``json_object``."""


def of_schema(schema: Any, whitespace: str | None = WHITESPACE) -> str:
    """JSON texts that a JSON Schema describes.

    Args:
        schema: As JSON text or as an object.
        whitespace: Regular expression of what may stand between the tokens of JSON; None for nothing.

    Raises:
        GrammarRefused: It is too large, or no schema.
    """
    if isinstance(schema, str):
        _check_size(schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarRefused(f"it is not JSON: {error}") from error
    if schema is False:
        raise GrammarRefused("no value satisfies false")
    if schema is not True and not isinstance(schema, dict):
        raise GrammarRefused("a schema is an object, true or false")
    options: Any = {"whitespace_flexible": False}
    if whitespace is not None:
        options = {"whitespace_pattern": whitespace}
    if schema is True:
        schema = {}
    _check_size(as_text(schema))
    return _form(functools.partial(LLMatcher.grammar_from_json_schema, overrides=options), as_text(rewritten(schema)))


def _form(build: Callable[[str], str], text: str) -> str:
    """Returns the form that is compiled.

    Raises:
        GrammarRefused: The compiler's reader raised an error, of any class: it documents none but raises several.
    """
    try:
        return build(text)
    except Exception as error:
        raise GrammarRefused(plain(f"it cannot be read: {error}")) from error


def of_regex(pattern: str) -> str:
    """Texts that a regular expression matches as a whole.

    Raises:
        GrammarRefused: It is too large.
    """
    _check_size(pattern)
    return _form(LLMatcher.grammar_from_regex, pattern)


def of_choices(choices: Sequence[str]) -> str:
    """One of these texts.

    Raises:
        GrammarRefused: They are too large together.
    """
    _check_size("".join(choices))
    return of_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def of_grammar(text: str) -> str:
    """Texts of a context-free grammar in the syntax of Lark, or in GBNF (that of llama.cpp).

    Raises:
        GrammarRefused: It is too large, or GBNF that cannot be read.
    """
    _check_size(text)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the reader of GBNF raises what it meets
        raise GrammarRefused(f"it cannot be read as GBNF: {error}") from error


@dataclass(frozen=True, slots=True)
class Tag:
    """A place in free text that holds JSON of a schema, between two texts."""

    begin: str
    schema: Any
    end: str


def of_tags(tags: Sequence[Tag], triggers: Sequence[str]) -> str:
    """Free text; behind a trigger, one of the tags that begin with it follows.

    Raises:
        GrammarRefused: They are too large together, or a tag begins with no trigger.
    """
    _check_size("".join([*triggers, *(f"{tag.begin}{as_text(tag.schema)}{tag.end}" for tag in tags)]))
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise GrammarRefused(f"{tag.begin!r} begins with none of the triggers")
    rules = ["TEXT: /(?s:.*)/"]
    regions = []
    for number, trigger in enumerate(triggers):
        inner = [
            f"{json.dumps(tag.begin[len(trigger) :])} {inline_schema(tag.schema)} {json.dumps(tag.end)}"
            for tag in tags
            if tag.begin.startswith(trigger)
        ]
        if inner:
            escaped = re.escape(trigger).replace("/", "\\/")
            rules += [
                f"until_{number}[lazy]: /(?s:.*){escaped}/",
                f"tag_{number}: until_{number} ({' | '.join(inner)})",
            ]
            regions.append(f"tag_{number}")
    return of_lark("\n".join([f"start: ({' | '.join(regions)})* TEXT", *rules]))


def inline_schema(schema: Any) -> str:
    """JSON of a schema, as a part of a grammar in the syntax of Lark.

    Raises:
        GrammarRefused: As ``of_schema``.
    """
    as_text(schema)
    fields = rewritten(schema) if isinstance(schema, dict) else {}
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': WHITESPACE}, **fields})}"


def of_lark(text: str) -> str:
    """Texts of a grammar in the syntax of Lark that this server has written itself, from checked parts."""
    return _form(LLMatcher.grammar_from_lark, text)


def _check_size(text: str) -> None:
    if len(text) > MAX_SOURCE_CHARS:
        raise GrammarRefused(f"it has {len(text)} characters, at most {MAX_SOURCE_CHARS} are taken")
