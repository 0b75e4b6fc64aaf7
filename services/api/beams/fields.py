"""The fields of beam search, as vLLM spells them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from services.api.fields import is_empty, refused
from services.api.generation import BeamParams
from services.api.strict import StrictModel

MAX_BEAMS = 16
"""Most beams of one prompt: each token of the answer takes a request for each of them."""

_REASON = "beam search keeps the likeliest outputs of the model itself"
_UNUSED: dict[str, tuple[Any, ...]] = {
    "stream": (),
    "stop": ((),),
    "stop_token_ids": (),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "logit_bias": ((),),
    "allowed_token_ids": (),
    "bad_words": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "benchmark_len": (),
    "tools": (),
    "echo": (),
}
"""Fields that beam search does not serve, and values that say nothing beside null, false and what is empty."""


class BeamFields(StrictModel):
    """What both endpoints take."""

    use_beam_search: bool | None = Field(
        None, description="Extension; the n likeliest outputs that a search with n beams finds, best first."
    )
    length_penalty: float | None = Field(
        None, ge=-10, le=10, description="Extension; power of the length that a beam's log probability is divided by."
    )

    def beams(self, n: int, *, ignore_eos: bool) -> BeamParams | None:
        """The search that is asked for; None for none."""
        if not self.use_beam_search:
            return None
        return BeamParams(n, 1.0 if self.length_penalty is None else self.length_penalty, ignore_eos)

    def check_beams(self, n: int, constraint_field: str) -> None:
        """
        Args:
            constraint_field: Name of the field that says what the output must follow; empty if there is none.

        Raises:
            PydanticCustomError: A field that beam search does not serve, or that means nothing without it.
        """
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1):
                raise refused(".length_penalty", self.length_penalty, "1 or null where use_beam_search is not true")
            return
        if n > MAX_BEAMS:
            raise refused(".n", n, f"at most {MAX_BEAMS} with use_beam_search")
        best_of = getattr(self, "best_of", None)
        if best_of not in (None, n):
            raise refused(".best_of", best_of, f"n = {n} where use_beam_search is true")
        if constraint_field:
            raise refused(f".{constraint_field}", "a constraint", f"null where use_beam_search is true: {_REASON}")
        for name, neutral in _UNUSED.items():
            value = getattr(self, name, None)
            if not is_empty(value) and value not in neutral:
                raise refused(f".{name}", value, f"null where use_beam_search is true: {_REASON}")
