"""How outputs are chosen and when they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when an output ends; None leaves a choice to the API's default.

    Names and meanings are those of vLLM's class and of the fields of ``/v1/completions``.

    Attributes:
        n: Outputs of each prompt; output i is drawn with ``seed + i``.
        temperature: 0 is greedy; 1 if not given.
        top_p: Keep the smallest set of tokens whose mass reaches this; in (0, 1].
        top_k: Keep so many tokens; 0 and -1 keep all.
        min_p: Drop tokens less likely than this share of the likeliest one; in [0, 1].
        seed: Drawn at random if not given. The same seed gives the same output, whatever runs beside it.
        max_tokens: Most tokens of an output; 16 for a prompt if not given, and the rest of the context for a chat.
        min_tokens: Fewest tokens of an output.
        stop: A string, or several, that end the output and are not part of it.
        stop_token_ids: Token ids that end the output, beside the model's own.
        ignore_eos: Go on after the model's own end.
        presence_penalty, frequency_penalty: In [-2, 2]; for tokens that the output holds.
        repetition_penalty: In [0.01, 100]; for tokens that prompt or output hold; 1 changes nothing.
        logit_bias: What is added to the logit of a token id; from -100 to 100.
        logprobs: Log probabilities of each token and of so many likeliest ones.
        prompt_logprobs: The same for the prompt's tokens.
        allowed_token_ids: The only tokens that may be chosen.
        bad_words: Texts that the output must not hold.
        truncate_prompt_tokens: Keep so many last tokens of the prompt; -1 keeps what the context takes.
        structured_outputs: What the output must follow, as ``{"json": SCHEMA}``, ``{"regex": ...}``,
            ``{"choice": [...]}`` or ``{"grammar": ...}``. SCHEMA is a JSON Schema, or a model class of pydantic.
        extra: Further fields of the API's body, such as ``priority``, ``deadline_s`` or ``thinking_token_budget``.
    """

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None

    def fields(self, *, chat: bool) -> dict[str, Any]:
        """Returns the fields of a body of the API that say the same."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        found = {name: value for name, value in given.items() if value is not None and name != "extra"}
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if name in found and not isinstance(found[name], str):
                found[name] = list(found[name])
        if self.logit_bias is not None:
            found["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            found["structured_outputs"] = {name: schema_of(each) for name, each in self.structured_outputs.items()}
        if chat and self.logprobs is not None:
            found |= {"logprobs": True, "top_logprobs": self.logprobs}
        return found | dict(self.extra or {})


def schema_of(value: Any) -> Any:
    """Returns the JSON Schema of a model class of pydantic; any other value as it is."""
    return value.model_json_schema() if hasattr(value, "model_json_schema") else value
