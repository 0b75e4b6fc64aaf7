"""By when a client wants its tokens, and which tier serves it: fields of completions and chats."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from core.request import FLEX, NO_SLO, Slo
from services.api.fields import MAX_PRIORITY, refused
from services.api.strict import StrictModel

MAX_TARGET_S = 86_400.0
"""Longest time that a client may name, in seconds: a day."""

PRIORITY_TIER = -1
"""Priority of the tier ``priority``, as far as the tenant may use it."""

Tier = Literal["default", "priority", "flex"]


class SloFields(StrictModel):
    """What a client wants of its stream; seconds."""

    ttft: float | None = Field(None, gt=0, le=MAX_TARGET_S, description="From the receipt to the first token.")
    tpot: float | None = Field(None, gt=0, le=MAX_TARGET_S, description="Between two tokens after that, in the mean.")


class TargetFields(StrictModel):
    """Deadlines, and OpenAI's tiers."""

    deadline_s: float | None = Field(
        None,
        gt=0,
        le=MAX_TARGET_S,
        description="Extension; seconds from the receipt within which the answer is to end.",
    )
    slo: SloFields | None = Field(None, description="Extension; times of tokens that are to be kept.")
    service_tier: Literal["auto", "default", "priority", "flex"] | None = Field(
        None, description="'priority' goes before 'default'; 'flex' takes what the others leave."
    )
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Extension; lower goes first; 0 if not given."
    )

    @model_validator(mode="after")
    def _check_tier(self) -> TargetFields:
        if self.service_tier == "priority" and self.priority is not None:
            raise refused(".priority", self.priority, "null where service_tier is 'priority', which is one itself")
        return self

    @property
    def tier(self) -> Tier | None:
        """The tier that is asked for; None where the client names none."""
        match self.service_tier:
            case "auto":
                return "default"
            case tier:
                return tier

    @property
    def request_priority(self) -> int:
        """``Request.priority``, before the tenant's range."""
        if self.service_tier == "priority":
            return PRIORITY_TIER
        return (self.priority or 0) + (FLEX if self.service_tier == "flex" else 0)

    @property
    def request_slo(self) -> Slo:
        """``Request.slo``."""
        if self.slo is None or not (self.slo.ttft or self.slo.tpot):
            return NO_SLO
        return Slo(self.slo.ttft or NO_SLO.ttft_s, self.slo.tpot or NO_SLO.tpot_s)
