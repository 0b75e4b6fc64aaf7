"""The fields that constrain an output: which grammar they become, and which are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer

from services.api.structured import Constraint
from services.api.text.grammars import grammar_of
from tests.unit.services.api.api_support import MODEL, ScriptedBackend

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi"}

SPELLINGS: list[tuple[dict[str, Any], Constraint]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        Constraint("", "schema", SCHEMA),
    ),
    ({"response_format": {"type": "json_object"}}, Constraint("", "object", True)),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint("", "schema", SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Constraint("", "schema", json.dumps(SCHEMA))),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Constraint("", "schema", SCHEMA, compact=True),
    ),
    ({"structured_outputs": {"json_object": True, "regex": None}}, Constraint("", "object", True)),
    ({"structured_outputs": {"choice": ["a", 'b"']}}, Constraint("", "choice", ["a", 'b"'])),
    ({"guided_json": SCHEMA}, Constraint("", "schema", SCHEMA)),
    ({"guided_regex": "a+"}, Constraint("", "regex", "a+")),
    ({"guided_choice": ["a", "b"]}, Constraint("", "choice", ["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, Constraint("", "grammar", 'start: "a"')),
]


@pytest.mark.parametrize(("fields", "constraint"), SPELLINGS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_spelling_becomes_its_grammar(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str, fields: dict[str, Any], constraint: Constraint
) -> None:
    body = CHAT if path.endswith("chat/completions") else COMPLETION
    response = await client.post(path, json={**body, **fields, "n": 2})
    assert response.status_code == 200, response.text
    assert [sampling.grammar for _, sampling in backend.calls] == [grammar_of(constraint)] * 2


async def test_text_is_free(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    fields = {"response_format": {"type": "text"}, "structured_outputs": None, "guided_json": None}
    assert (await client.post("/v1/chat/completions", json={**CHAT, **fields})).status_code == 200
    assert backend.calls[0][1].grammar == ""


FUNCTION = {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}


@pytest.mark.parametrize("spelling", ["response_format", "object", "text"])
async def test_structural_tags_hold_json_in_free_text(
    client: httpx.AsyncClient, backend: ScriptedBackend, spelling: str
) -> None:
    tags = {"type": "structural_tag", "structures": [FUNCTION], "triggers": ["<function="]}
    written = {"structured_outputs": {"structural_tag": json.dumps(tags) if spelling == "text" else tags}}
    fields = {"response_format": tags} if spelling == "response_format" else written
    answer = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    vocabulary = LLTokenizer("byte")
    matcher = LLMatcher(vocabulary, backend.calls[0][1].grammar)
    for text, is_allowed in (
        ("free <function", True),
        ('It is <function=f>{"a": 1}</function> and <function=f>{"a":2}</function>.', True),
        ("<function=f>{}", False),
        ("<function=g>", False),
    ):
        ids = vocabulary.tokenize_str(text)
        assert (matcher.validate_tokens(ids) == len(ids)) is is_allowed, text


def _deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


DEEP = _deep(64)

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
        "null",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema", "missing"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "structures"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "a list"),
    (
        {"response_format": {"type": "structural_tag", "structures": [FUNCTION], "triggers": ["<call="]}},
        "response_format",
        "none of the triggers",
    ),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "only one of"),
    ({"guided_regex": "("}, "guided_regex", "guided_regex"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "guided_choice"),
    (
        {"guided_json": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}},
        "guided_json.properties.a",
        "/properties/a",
    ),
    ({"guided_json": 5}, "guided_json", "got 5, expected a JSON Schema: an object, true, false, or its text"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "abc"}}},
        "response_format.json_schema.schema",
        "schema: got 'abc', expected a JSON Schema: an object, true or false",
    ),
    (
        {"tool_choice": 5},
        "tool_choice",
        "tool_choice: got 5, expected 'auto', 'none', 'required' or the name of a function",
    ),
    ({"guided_json": {"$ref": "http://e/x"}}, "guided_json", "other documents are not fetched"),
    ({"guided_json": DEEP}, "guided_json", "130 levels deep"),
    ({"guided_json": {"properties": {"a": {"minimum": "1"}}}}, "guided_json.properties.a", "a number is expected"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}},
        "response_format.json_schema.schema",
        "130 levels deep",
    ),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{**FUNCTION, "schema": DEEP}],
                "triggers": ["<"],
            }
        },
        "response_format",
        "130 levels deep",
    ),
    ({"guided_json": {"description": "x" * 70_000}}, "guided_json", "characters"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
async def test_refused_with_the_field(
    client: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert not re.search(r"Input should|dict\[|literal\[|f64|registry", str(error)), error
    assert str(error["param"]).endswith(param) and words in error["message"], error
    assert not backend.calls


async def test_an_emulated_device_follows_nothing(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    import dataclasses

    backend.model = dataclasses.replace(backend.model, emulated="h100")
    response = await client.post("/v1/chat/completions", json={**CHAT, "guided_choice": ["a"]})
    assert response.status_code == 400
    assert "emulated" in response.json()["error"]["message"]
