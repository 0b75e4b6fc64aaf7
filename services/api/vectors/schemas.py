"""Bodies and replies of ``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, model_validator

from farsight.services.api.field_groups import TargetFields
from farsight.services.api.fields import COMMON_NEUTRAL, NeutralOnly, refused
from farsight.services.api.schemas import check_prompt, named_prompts

MAX_INPUTS = 2048
"""Texts of one request."""

Input = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(
        lambda value: check_prompt(value, MAX_INPUTS),
        json_schema_input_type=str | list[str] | list[int] | list[list[int]],
    ),
]


class PrefillFields(TargetFields):
    """What all three share."""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        name: COMMON_NEUTRAL[name] for name in ("metadata", "safety_identifier", "request_id")
    }

    model: str | None = Field(None, description="A name that is served here; the first of them if not given.")
    user: str | None = Field(None, description="Names your end user; has no effect.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Extension; keep so many first tokens of a text; -1 keeps what the model takes."
    )


class EmbeddingRequest(PrefillFields):
    """``POST /v1/embeddings``"""

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        None, ge=1, description="Keep so many first numbers of each embedding and bring the rest to length 1 again."
    )
    add_special_tokens: bool | None = Field(
        None, description="Extension; false leaves out the tokens that the tokenizer adds."
    )

    @property
    def inputs(self) -> list[tuple[str, str | list[int]]]:
        """Each input with its field, as errors name it."""
        return named_prompts("input", self.input)


_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]


class ScoreRequest(PrefillFields):
    """``POST /v1/score``: how well each pair of texts belongs together."""

    text_1: str | _Texts
    text_2: str | _Texts

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        return list(zip(first, second, strict=True))

    @model_validator(mode="after")
    def _check_lengths(self) -> ScoreRequest:
        one = 1 if isinstance(self.text_1, str) else len(self.text_1)
        two = 1 if isinstance(self.text_2, str) else len(self.text_2)
        if one not in (1, two):
            raise refused(".text_1", f"{one} texts", f"one text, or {two} as in text_2")
        return self


def _document(value: Any) -> str:
    text = value.get("text") if isinstance(value, dict) and set(value) == {"text"} else value
    if not isinstance(text, str):
        raise refused("", value, 'a string, or an object {"text": ...}')
    return text


_Document = Annotated[str, PlainValidator(_document, json_schema_input_type=str | dict[str, str])]


class RerankRequest(PrefillFields):
    """``POST /v1/rerank``: the documents in the order in which they answer a query."""

    query: str
    documents: Annotated[list[_Document], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: int | None = Field(None, ge=0, description="Results that are returned; all for 0, or if not given.")
    return_documents: bool | None = Field(None, description="Whether results hold their text; true if not given.")


class TextUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    gpu_seconds: float = 0.0


class EmbeddingRow(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(BaseModel):
    object: Literal["list"] = "list"
    id: str
    created: int
    model: str
    data: list[EmbeddingRow]
    usage: TextUsage


class ScoreRow(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreReply(BaseModel):
    object: Literal["list"] = "list"
    id: str
    created: int
    model: str
    data: list[ScoreRow]
    usage: TextUsage


class RankedDocument(BaseModel):
    text: str


class RankedRow(BaseModel):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankReply(BaseModel):
    id: str
    model: str
    results: list[RankedRow]
    usage: TextUsage
