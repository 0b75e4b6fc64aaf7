"""Forced calls of every family: random tokens that the grammar allows always parse, and follow the tool's schema."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from farsight import services
from farsight.tokenization.grammars.compiler import GrammarCompiler, problem_of
from farsight.tokenization.grammars.reasoning import Matcher
from farsight.tokenization.grammars.sources import of_grammar
from farsight.tokenization.text_stream import TextDecoder
from farsight.tokenization.tool_formats.formats import FORMATS, THINK_BEGIN, THINK_END
from farsight.tokenization.tool_formats.grammar import GrammarWriter, UnwritableTool, no_tokens
from farsight.tokenization.tool_formats.parser import parser_of
from farsight.tokenization.tool_formats.parts import CallArguments, CallEnd, CallStart, OutputForm, Part, Tool
from farsight.tokenization.tool_formats.regions import text_arguments
from tests.volumes import at_volume

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "place.order-v2": {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {
                        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
                        "gift": {"$ref": "#/$defs/yes"},
                    },
                    "required": ["sku", "gift"],
                    "additionalProperties": False,
                },
            },
            "express": {"type": "boolean"},
            "note": {"type": ["string", "null"], "maxLength": 6},
        },
        "required": ["items", "express"],
        "additionalProperties": False,
        "$defs": {"yes": {"type": "boolean"}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [Tool(name, json.dumps(schema)) for name, schema in SCHEMAS.items()]
TEXTS = frozenset(pair for name, schema in SCHEMAS.items() for pair in text_arguments(name, schema))
FAMILIES = sorted(FORMATS)


@cache
def tokenizer_of(family: str) -> Tokenizer:
    """The embedded model's tokenizer, with the markers of a family as control tokens, as its models have them."""
    tokenizer = Tokenizer.from_file(str(Path(services.__file__).parent / "embedded_model/tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in FORMATS[family].markers])
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in (THINK_BEGIN, THINK_END)])
    return tokenizer


@cache
def compiler_of(family: str) -> GrammarCompiler:
    tokenizer = tokenizer_of(family)
    return GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [eos_of(tokenizer)])


def eos_of(tokenizer: Tokenizer) -> int:
    return int(tokenizer.token_to_id("</s>") or 0)


def special_id(family: str, text: str) -> int | None:
    return tokenizer_of(family).token_to_id(text) if text in FORMATS[family].markers else None


def writer(family: str) -> GrammarWriter:
    return GrammarWriter(FORMATS[family], TOOLS, lambda text: special_id(family, text))


def allowed_ids(matcher: Matcher) -> list[int]:
    return [8 * at + bit for at, byte in enumerate(matcher.allowed()) if byte for bit in range(8) if byte >> bit & 1]


def sample(family: str, grammar: str, rng: random.Random, most: int = 600) -> str:
    """What a model with random weights would write: each allowed token alike."""
    tokenizer = tokenizer_of(family)
    matcher = compiler_of(family).follow(of_grammar(grammar))
    stream = TextDecoder(tokenizer).start(shows_special=True)
    eos = eos_of(tokenizer)
    texts: list[str] = []
    for _ in range(most):
        choices = allowed_ids(matcher)
        assert choices, matcher.problem
        chosen = eos if eos in choices and rng.random() < 0.2 else rng.choice(choices)
        if chosen == eos:
            return "".join(texts) + stream.flush()
        texts.append(stream.push(chosen))
        matcher.advance([chosen])
    raise AssertionError(f"no end after {most} tokens: {''.join(texts)!r}")


def parse(form: OutputForm, text: str, cuts: random.Random | None = None) -> list[Part]:
    parser = parser_of(form)
    parts: list[Part] = []
    at = 0
    while at < len(text):
        step = len(text) if cuts is None else cuts.randint(1, 5)
        parts += parser.feed(text[at : at + step])
        at += step
    return parts + parser.end()


def calls_in(parts: list[Part]) -> list[tuple[str, str]]:
    names = [part.name for part in parts if isinstance(part, CallStart)]
    texts = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.index] += part.text
    return list(zip(names, texts, strict=True))


@at_volume(15, 200)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_forced_call_parses_and_is_valid(family: str, volume: int) -> None:
    rng = random.Random(family)
    form = OutputForm(family, tuple(SCHEMAS), texts=TEXTS)
    grammar = writer(family).forced(parallel=False, reasons=False, in_reasoning=False)
    for _ in range(volume):
        text = sample(family, grammar, rng)
        parts = parse(form, text, rng)
        assert all(isinstance(part, CallStart | CallArguments | CallEnd) for part in parts), (text, parts)
        ((name, arguments),) = calls_in(parts)
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reasons", [False, True])
def test_calls_side_by_side_and_behind_reasoning(family: str, reasons: bool) -> None:
    rng = random.Random(7)
    form = OutputForm(family, tuple(SCHEMAS), reasons, in_reasoning=reasons and family != "harmony", texts=TEXTS)
    written = writer(family).forced(parallel=True, reasons=reasons, in_reasoning=form.in_reasoning)
    most = 0
    for _ in range(8):
        text = sample(family, written.replace("(?s:.*)", "[a-z ]{0,9}"), rng, 4000)
        parts = parse(form, text, rng)
        calls = calls_in(parts)
        most = max(most, len(calls))
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        assert calls_in(parse(form, text)) == calls
    assert most > 1 or not FORMATS[family].parallel


@pytest.mark.parametrize("family", FAMILIES)
def test_grammars_are_tried_without_a_model(family: str) -> None:
    for reasons in (False, True):
        plain = GrammarWriter(FORMATS[family], TOOLS, no_tokens)
        forced = plain.forced(parallel=True, reasons=reasons, in_reasoning=reasons)
        assert problem_of(of_grammar(forced)) == "", forced
        free = GrammarWriter(FORMATS[family], TOOLS, no_tokens).free(parallel=True, reasons=reasons, in_reasoning=False)
        assert problem_of(of_grammar(free)) == "", free
    tool = Tool("f", json.dumps({"type": "object", "oneOf": [{"required": ["a"]}]}))
    if FORMATS[family].style in ("pythonic", "python", "tags", "keys", "gemma"):
        with pytest.raises(UnwritableTool, match="oneOf"):
            GrammarWriter(FORMATS[family], [tool], no_tokens).forced(parallel=False, reasons=False, in_reasoning=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_free_text_becomes_a_call_only_in_its_form(family: str) -> None:
    matcher_of = compiler_of(family)
    tokenizer = tokenizer_of(family)
    grammar = writer(family).free(parallel=True, reasons=False, in_reasoning=False)
    call = sample(family, writer(family).forced(parallel=False, reasons=False, in_reasoning=False), random.Random(1))
    lead = "<|channel|>final<|message|>" if family == "harmony" else ""
    for text, is_allowed in ((f"{lead}A plain answer.", True), (call, True), (f"{call[:-3]}~~~", False)):
        matcher = matcher_of.follow(of_grammar(grammar))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert (matcher.num_allowed(ids) == len(ids)) is is_allowed, text
