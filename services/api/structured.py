"""The fields of a request that constrain its output to a grammar: OpenAI's ``response_format`` and vLLM's spellings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PlainValidator, model_validator

from farsight.services.api.fields import MAX_CHOICES, NeutralOnly, StrictModel, refused


def _check_schema(value: Any) -> dict[str, Any] | bool:
    if not isinstance(value, dict | bool):
        raise refused("", value, "a JSON Schema: an object, true or false")
    return value


def _check_schema_or_text(value: Any) -> str | dict[str, Any] | bool | None:
    if value is not None and not isinstance(value, str | dict | bool):
        raise refused("", value, "a JSON Schema: an object, true, false, or its text")
    return value


Schema = Annotated[dict[str, Any] | bool, PlainValidator(_check_schema, json_schema_input_type=dict[str, Any] | bool)]
"""A JSON Schema; ``true`` describes every JSON value."""

SchemaOrText = Annotated[
    str | dict[str, Any] | bool | None,
    PlainValidator(_check_schema_or_text, json_schema_input_type=str | dict[str, Any] | bool | None),
]

MAX_TAGS = 128
"""Structures, and triggers, of a structural tag."""


class Constraint(NamedTuple):
    """What an output must follow.

    Attributes:
        field: Field of the request that says so.
        kind: ``schema``, ``object`` (any JSON object), ``regex``, ``choice``, ``grammar`` or ``tags``.
        value: As the client wrote it.
        compact: Whether JSON holds no white space outside of strings.
    """

    field: str
    kind: Literal["schema", "object", "regex", "choice", "grammar", "tags"]
    value: Any
    compact: bool = False


class JsonSchemaFormat(StrictModel):
    """``strict`` changes nothing: every output follows the schema."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    strict: bool | None = None
    schema_: Schema = Field(alias="schema", description="JSON Schema, draft 2020-12.")


class TagStructure(StrictModel):
    """JSON of a schema between two texts."""

    begin: str = Field(min_length=1)
    schema_: Schema = Field(alias="schema")
    end: str = Field(min_length=1)


class StructuralTag(StrictModel):
    """Free text in which each trigger is the beginning of one of the structures."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[TagStructure] = Field(min_length=1, max_length=MAX_TAGS)
    triggers: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, max_length=MAX_TAGS)


def _check_structural_tag(value: Any) -> StructuralTag:
    """vLLM takes it as text as well."""
    try:
        return StructuralTag.model_validate(json.loads(value) if isinstance(value, str) else value)
    except (ValueError, RecursionError) as error:  # a ValidationError is a ValueError
        raise refused("", value, "an object with structures (begin, schema, end) and triggers, or its text") from error


class ResponseFormat(StrictModel):
    """OpenAI's spelling; ``structural_tag`` is vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[TagStructure] | None = Field(None, min_length=1, max_length=MAX_TAGS)
    triggers: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=MAX_TAGS)

    @model_validator(mode="after")
    def _check_together(self) -> ResponseFormat:
        for name in ("structures", "triggers"):
            if (getattr(self, name) is None) == (self.type == "structural_tag"):
                found = None if getattr(self, name) is None else "a list"
                expected = "a list" if self.type == "structural_tag" else f"null where type is {self.type!r}"
                raise refused(f".{name}", found, expected)
        if (self.json_schema is None) == (self.type == "json_schema"):
            expected = "an object with 'schema'" if self.type == "json_schema" else f"null where type is {self.type!r}"
            raise refused(".json_schema", None if self.json_schema is None else "an object", expected)
        return self

    @property
    def tags(self) -> StructuralTag | None:
        """What a structural tag describes."""
        if self.structures is None or self.triggers is None:
            return None
        return StructuralTag.model_construct(structures=self.structures, triggers=self.triggers)


StructuralTagField = Annotated[
    StructuralTag, PlainValidator(_check_structural_tag, json_schema_input_type=StructuralTag | str)
]
Choices = list[str]


class StructuredOutputs(StrictModel):
    """vLLM's spelling; exactly one of ``json``, ``json_object``, ``regex``, ``choice``, ``grammar`` and
    ``structural_tag`` is given."""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        "disable_additional_properties": NeutralOnly((False,), 'write "additionalProperties": false into the schema'),
        "whitespace_pattern": NeutralOnly((), "only disable_any_whitespace is supported"),
        "disable_fallback": NeutralOnly((True, False), "there is one engine of grammars"),
    }

    json_: SchemaOrText = Field(None, alias="json", description="JSON Schema, as an object or as its text.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, min_length=1)
    choice: Choices | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = Field(None, min_length=1, description="In the syntax of Lark, or GBNF.")
    structural_tag: StructuralTagField | None = Field(None, description="Free text with JSON between tags.")
    disable_any_whitespace: bool | None = None

    def constraints(self) -> list[Constraint]:
        compact = bool(self.disable_any_whitespace)
        found = _named("structured_outputs.", self.json_, self.regex, self.choice, self.grammar)
        if self.json_object:
            found.append(Constraint("structured_outputs.json_object", "object", True))
        if self.structural_tag is not None:
            found.append(Constraint("structured_outputs.structural_tag", "tags", self.structural_tag))
        return [each._replace(compact=compact) for each in found]

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.constraints()) != 1:
            expected = "exactly one of json, json_object, regex, choice, grammar and structural_tag"
            raise refused("", f"{len(self.constraints())} of them", expected)
        return self


def constraint_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: tuple[Any, str | None, Choices | None, str | None],
) -> Constraint | None:
    """The one constraint of a request.

    Args:
        guided: ``guided_json``, ``guided_regex``, ``guided_choice`` and ``guided_grammar``.

    Raises:
        PydanticCustomError: There are several.
    """
    found = _named("guided_", *guided)
    if structured is not None:
        found += structured.constraints()
    if response_format is not None and response_format.type == "json_object":
        found.append(Constraint("response_format", "object", True))
    if response_format is not None and response_format.json_schema is not None:
        schema = response_format.json_schema.schema_
        found.append(Constraint("response_format.json_schema.schema", "schema", schema))
    if response_format is not None and response_format.tags is not None:
        found.append(Constraint("response_format", "tags", response_format.tags))
    if len(found) > 1:
        names = " and ".join(each.field for each in found)
        raise refused(f".{found[1].field}", "a second constraint", f"null: the output can follow only one of {names}")
    return found[0] if found else None


def _named(
    prefix: str, schema: Any, regex: str | None, choice: Choices | None, grammar: str | None
) -> list[Constraint]:
    found = []
    if schema is not None:
        found.append(Constraint(f"{prefix}json", "schema", schema))
    if regex is not None:
        found.append(Constraint(f"{prefix}regex", "regex", regex))
    if choice is not None:
        found.append(Constraint(f"{prefix}choice", "choice", choice))
    if grammar is not None:
        found.append(Constraint(f"{prefix}grammar", "grammar", grammar))
    return found
