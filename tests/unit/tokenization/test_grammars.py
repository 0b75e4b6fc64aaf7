"""Grammars of clients: which are refused and where, what hostile ones cost, and what tokens they leave."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.core.request import ReasoningBudget
from farsight.tokenization.grammars import sources
from farsight.tokenization.grammars.compiler import GrammarCompiler, problem_of
from farsight.tokenization.grammars.problems import GrammarRefused, find_place
from farsight.tokenization.grammars.reasoning import AnyText, BudgetMatcher
from farsight.tokenization.loading import load_tokenizer

EMBEDDED_MODEL = Path(__file__).parents[3] / "services" / "embedded_model"
EOS = 2


@cache
def compiler() -> GrammarCompiler:
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    return GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), (EOS,))


def ids_of(text: str) -> list[int]:
    ids: list[int] = load_tokenizer(EMBEDDED_MODEL).encode(text, add_special_tokens=False).ids
    return ids


def allowed(mask: bytes) -> set[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def problem_with(schema: Any) -> str:
    try:
        return problem_of(sources.of_schema(schema))
    except GrammarRefused as refused:
        return refused.reason


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"properties": {"a": {"items": {"type": "integer", "minimum": 5, "maximum": 3}, "minItems": 1}}}, None, ""),
        ({"type": "object", "properties": {"a": {"type": "foo"}}}, "/properties/a", "Invalid type"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "/items", "uniqueItems"),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^(?=a)b$"}]}, "/anyOf/1", "look-around"),
        ({"$defs": {"x/y": {"type": "no"}}, "$ref": "#/$defs/x~1y"}, "/$defs/x~1y", "Invalid type"),
        ({"$ref": "http://elsewhere/schema"}, "", "elsewhere"),
        (
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]},
            "/properties/a",
            "nsatisfiable",
        ),
    ],
)
def test_a_schema_is_refused_with_its_place(schema: Any, place: str | None, words: str) -> None:
    found, reason = find_place(schema, problem_with)
    if place is None:
        assert not reason
    else:
        assert (found, words in reason) == (place, True), (found, reason)


@pytest.mark.parametrize(
    "source",
    [
        lambda: sources.of_schema('{"items":' * 5000 + "{}" + "}" * 5000),
        lambda: sources.of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        lambda: sources.of_schema({"description": "x" * sources.MAX_SOURCE_CHARS}),
        lambda: sources.of_schema("{"),
        lambda: sources.of_schema(False),
        lambda: sources.of_schema("[1]"),
        lambda: sources.of_regex("(" * 3000 + "a" + ")" * 3000),
        lambda: sources.of_regex("a" * (sources.MAX_SOURCE_CHARS + 1)),
        lambda: sources.of_choices(["x" * 1000] * 100),
        lambda: sources.of_grammar("start: " + "(" * 3000 + '"a"' + ")" * 3000),
        lambda: sources.of_grammar("start: nothing"),
        lambda: sources.of_grammar("start: start"),
    ],
)
def test_what_cannot_be_compiled_is_refused(source: Any) -> None:
    try:
        problem = problem_of(source())
    except GrammarRefused as refused:
        problem = refused.reason
    assert problem and len(problem) <= 1000


@pytest.mark.parametrize(
    "grammar",
    [
        sources.of_regex("(.*a){20}"),
        sources.of_regex("((a|b|c){1,100}d?){1,100}[^x]{0,5000}"),
        sources.of_regex("(a|b)*a(a|b){30}c"),
        sources.of_grammar('start: a\na: a a | "x" | ""'),
        sources.of_schema({"type": "string", "minLength": 100_000}),
        sources.of_schema({"enum": [f"value {i * 7919}" for i in range(2000)]}),
    ],
)
def test_a_costly_grammar_ends_within_its_limits(grammar: str) -> None:
    """Each token is allowed or the grammar says that it costs too much: nothing hangs, nothing raises."""
    matcher = compiler().follow(grammar)
    for _ in range(50):
        mask = allowed(matcher.allowed())
        if not mask or mask == {EOS}:
            break
        matcher.advance([max(mask)])
    assert mask or matcher.problem


def test_the_output_so_far_decides() -> None:
    grammar = sources.of_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    text = '{"a": 1}'
    known, later = ids_of(text)[:4], ids_of(text)[4:]
    resumed, whole = compiler().follow(grammar, known), compiler().follow(grammar)
    for token_id in known:
        assert token_id in allowed(whole.allowed())
        whole.advance([token_id])
    for token_id in later:
        assert resumed.allowed() == whole.allowed()
        resumed.advance([token_id])
        whole.advance([token_id])
    assert EOS in allowed(resumed.allowed())


def test_gbnf_lark_and_compact_json_are_read_by_a_model_that_has_an_end() -> None:
    for grammar in ('root ::= "a" | "b"', 'start: "a" | "b"'):
        mask = allowed(compiler().follow(sources.of_grammar(grammar)).allowed())
        assert mask == {*ids_of("a"), *ids_of("b")}
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    matcher = compiler().follow(sources.of_schema(json.dumps(schema), None))
    matcher.advance(ids_of('{"a":'))
    assert allowed(matcher.allowed()) == set(ids_of("1")), "no space"
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    with pytest.raises(GrammarRefused, match="ends an output"):
        GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), ()).follow(sources.of_choices(["a"]))


def test_looking_ahead_changes_nothing() -> None:
    matcher = compiler().follow(sources.of_choices(["yes", "no"]))
    before = matcher.allowed()
    good, bad = ids_of("ye"), ids_of("x")
    masks = matcher.allowed_after([*good, *bad])
    assert len(masks) == len(good) + 1, "no mask follows a token that is forbidden"
    assert matcher.num_allowed([*good, *bad]) == len(good)
    whole = [*ids_of("no"), EOS]
    assert len(matcher.allowed_after([*whole, EOS, EOS])) >= len(whole)
    assert matcher.allowed() == before == masks[0]


VOCAB = 40
END = (3, 4, 3, 5)


def allowed_ids(mask: bytes) -> list[int]:
    return [token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1]


def follow(budget: ReasoningBudget, seed: int) -> tuple[list[int], int]:
    """An output of random tokens, of those that are allowed, and in how many steps only one was."""
    rng, matcher = random.Random(seed), BudgetMatcher(AnyText(VOCAB), budget)
    output: list[int] = []
    num_forced = 0
    for _ in range(30):
        options = allowed_ids(matcher.allowed())
        num_forced += len(options) == 1
        guess = [rng.choice([3, 4, 5, 9]) for _ in range(4)]
        masks = matcher.allowed_after(guess)
        kept = matcher.num_allowed(guess)
        assert len(masks) == kept + 1, "a mask for each token that may come, and for what follows it"
        assert [allowed_ids(mask).count(token) for mask, token in zip(masks, guess, strict=False)][:kept] == [1] * kept
        token = rng.choice(options) if rng.random() < 0.5 or not kept else guess[0]
        matcher.advance([token])
        output.append(token)
        again = BudgetMatcher(AnyText(VOCAB), budget)
        again.advance(output)
        assert again.allowed() == matcher.allowed(), "it depends on the output alone"
    assert matcher.num_tokens == len(output)
    return output, num_forced


def ends_at(output: list[int], first: int) -> int:
    """Where ``END`` begins for the first time, from a place on."""
    return next(i for i in range(first, len(output)) if tuple(output[i : i + len(END)]) == END)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_reasoning_has_at_most_so_many_tokens(num_tokens: int) -> None:
    lengths = set()
    for seed in range(200):
        output, num_forced = follow(ReasoningBudget(num_tokens, (), END), seed)
        length = ends_at(output, 0)
        assert length <= num_tokens
        # What was said of the end already is not said twice.
        assert num_forced <= len(END)
        lengths.add(length)
    assert num_tokens in lengths or num_tokens == 7


def test_an_output_that_begins_otherwise_has_no_reasoning() -> None:
    matcher = BudgetMatcher(AnyText(VOCAB), ReasoningBudget(0, (7, 8), END))
    matcher.advance([7, 9])
    assert len(allowed_ids(matcher.allowed())) == VOCAB
    matcher = BudgetMatcher(AnyText(VOCAB), ReasoningBudget(0, (7, 8), END))
    matcher.advance([7])
    assert len(allowed_ids(matcher.allowed())) == VOCAB
    matcher.advance([8])
    assert allowed_ids(matcher.allowed()) == [END[0]]
    for num_tokens, end in ((-1, END), (3, ())):
        with pytest.raises(InvalidValueError, match="thinking_token_budget"):
            ReasoningBudget(num_tokens, (), end)
