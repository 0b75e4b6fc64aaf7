"""JSON Schemas as clients write them: every one is followed exactly or refused for a reason that a client can read."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from farsight.tokenization.grammars import sources
from farsight.tokenization.grammars.compiler import problem_of
from farsight.tokenization.grammars.problems import GrammarRefused
from farsight.tokenization.grammars.rewriting import MAX_DEPTH, nesting, rewritten
from tests.unit.tokenization.random_schemas import random_bounds, random_output, random_schema

INTERNAL = re.compile(
    r"f64|coerce|lenient|registry|Some\(|None|retriever|Unimplemented|NoExtension|json-schema:///|\\ud"
)


def problem(schema: Any) -> str:
    """Returns why a schema is refused; empty if it is followed."""
    try:
        return problem_of(sources.of_schema(schema))
    except GrammarRefused as refused:
        return refused.reason


def wrong_outputs(schema: Any, count: int, most: int = 200) -> list[str]:
    """Returns those of ``count`` random outputs that the schema does not describe."""
    validator, grammar = jsonschema.Draft202012Validator(schema), sources.of_schema(schema, None)
    texts = [random_output(grammar, random.Random(seed), most) for seed in range(count)]
    assert any(text is not None for text in texts), schema
    return [text for text in texts if text is not None and not validator.is_valid(json.loads(text))]


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("levels", [62, 64, 500, 5000])
def test_a_deep_schema_is_refused_with_its_depth(levels: int) -> None:
    depth = 2 * levels + 2
    for refused in (
        lambda: sources.of_schema(nested(levels)),
        lambda: sources.inline_schema(nested(levels)),
        lambda: sources.of_tags([sources.Tag("<a>", nested(levels), "</a>")], ["<"]),
    ):
        with pytest.raises(GrammarRefused, match=f"{depth} levels deep, at most {MAX_DEPTH}"):
            refused()
    schema = nested(61)
    assert (nesting(schema), problem(schema)) == (MAX_DEPTH, "")
    assert problem_of(sources.of_lark(f"start: {sources.inline_schema(schema)}")) == ""


@pytest.mark.parametrize("seeds", [range(500), pytest.param(range(500, 10_500), marks=pytest.mark.nightly)])
def test_random_schemas_are_followed_or_refused(seeds: range) -> None:
    """Any other error than a refusal is raised."""
    found = {"followed": 0, "refused": 0}
    for seed in seeds:
        reason = problem(random_schema(random.Random(seed)))
        assert not INTERNAL.search(re.sub(r"'.*?'|\".*?\"|(?:got|is) .*", "", reason)), (seed, reason)
        found["refused" if reason else "followed"] += 1
    assert min(found.values()) >= 50, found


@pytest.mark.parametrize("text", ["\ud800", "a\ud83db"])
def test_half_a_character_is_refused(text: str) -> None:
    for source in (sources.of_regex, sources.of_grammar, sources.of_schema, lambda each: sources.of_choices([each])):
        with pytest.raises(GrammarRefused):
            reason = problem_of(source(text))
            raise GrammarRefused(reason) if reason else AssertionError(source)


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5}, ("2", "2.0", "2.00000000000000000001", "2.5")),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, ("-2", "-2.0")),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ("0", "-0", "-0.0")),
        ({"exclusiveMaximum": 1}, ("1", "0.99999999999999999999")),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0", "0.0", "-0")),
        ({"minimum": 2, "exclusiveMinimum": True, "maximum": 2.5}, ("2",)),
        ({"type": "integer", "minimum": 9007199254740991, "maximum": 9007199254740992}, ("9007199254740990",)),
    ],
)
def test_a_bound_that_is_excluded_is_not_written(schema: Any, refused: tuple[str, ...]) -> None:
    """Also not as digits that a client reads as the bound."""
    grammar = sources.of_schema({"type": "number", **schema}, None)
    assert [text for text in refused if allows(grammar, text)] == []


def allows(grammar: str, text: str) -> bool:
    """Returns whether a grammar allows a text as a whole output."""
    tokens = LLTokenizer("byte")
    ids = [*text.encode(), tokens.eos_token]
    return LLMatcher(tokens, grammar, log_level=0).validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 2700), marks=pytest.mark.nightly)])
def test_outputs_lie_between_their_bounds(seeds: range) -> None:
    ended, wrong = 0, []
    for seed in seeds:
        schema = random_bounds(random.Random(seed))
        if problem(schema):
            continue  # no number is between them
        text = random_output(sources.of_schema(schema, None), random.Random(seed))
        if text is not None:
            ended += 1
            if not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)):
                wrong.append((schema, text))
    assert ended > 5 / 6 * len(seeds) and not wrong, wrong


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"maximum": 2**53 + 1, "minimum": -(2**63)}, ""),
        ({"minimum": 2**53 + 1}, "2^53"),
        ({"const": 2**53 + 1}, "2^53"),
        ({"enum": [[0.30000000000000004]]}, "significant digits"),
        ({"maximum": "3"}, "a number is expected"),
        ({"maximum": float("nan")}, "no numbers of JSON"),
        ({"type": "string", "maxLength": 2**40}, ""),
    ],
)
def test_numbers_that_the_compiler_would_round(schema: Any, words: str) -> None:
    reason = problem(schema)
    assert bool(reason) == bool(words) and words in reason, reason


def kind(name: str) -> Any:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}, "v": {"type": "boolean"}},
        "required": ["kind"],
        "additionalProperties": False,
    }


STRING, ROOT = {"type": "string", "maxLength": 2}, {"$defs": {"a": kind("a"), "b": kind("b")}}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "boolean"}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], **ROOT},
        {"oneOf": [{"type": "integer", "minimum": -9, "maximum": 3}, {"type": "number", "minimum": 4, "maximum": 9}]},
        {"oneOf": [STRING, {"type": "string", "minLength": 3, "maxLength": 4}]},
        {
            "type": "object",
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
            "properties": {"a": STRING, "b": STRING},
        },
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}, "minItems": 2},
        {"type": "array", "uniqueItems": True, "items": {"enum": list("abcdefgh")}},
        {"type": "array", "uniqueItems": True, "items": {"enum": [1, 1.0, True, None]}},
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}},
        {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 2},
        {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/e"}, "$defs": {"e": {"enum": ["x", "y"]}}},
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "maxItems": 1},
        {"type": "array", "uniqueItems": False, "items": {"type": "boolean"}},
    ],
)
def test_what_was_refused_and_can_be_followed(schema: Any) -> None:
    assert problem(schema) == ""
    assert wrong_outputs(schema, 20) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"const": 1}, {"type": "integer"}]},
        {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "integer"}}]},
        {"oneOf": [kind("a"), {"type": "object"}]},
        {"oneOf": [{"$ref": "#/oneOf/1"}, {"$ref": "#/oneOf/0"}]},
        {"oneOf": [{"maximum": 2}, {"minimum": 3}]},  # a text follows both
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
        {"type": "array", "uniqueItems": True, "items": {"enum": list(range(30))}},
    ],
)
def test_what_may_follow_two_options_or_repeat_is_refused(schema: Any) -> None:
    assert problem(schema)


def test_few_values_are_listed_in_every_order_and_more_in_theirs() -> None:
    few = rewritten({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}})
    assert few == {"type": "array", "enum": [[], ["a"], ["b"], ["a", "b"], ["b", "a"]]}
    many = rewritten({"type": "array", "uniqueItems": True, "items": {"enum": list("abcdefgh")}})
    assert ["a", "c", "h"] in many["enum"] and ["c", "a"] not in many["enum"] and len(many["enum"]) == 2**8


def test_the_compilers_own_options_are_not_the_clients() -> None:
    loose = {"x-guidance": {"lenient": True, "coerce_one_of": True}, "not": {"type": "string"}}
    assert "not" in problem(loose)
    assert "lenient" not in sources.inline_schema(loose)
