"""Why a batch holds the requests that it holds, and why it ran before the others: what an explanation shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.decisions import Facts
from policies.batching.base import FormedBatch
from policies.placement.base import Choice


@dataclass(frozen=True, slots=True)
class BatchChoice(Choice):
    """An idle worker pulled a batch; one choice for all its requests.

    Attributes:
        told: Its facts: ``batch_size`` requests, ``batch_len`` L(B) and ``generation_len`` G(B), its longest prompt
            and its longest predicted output in tokens, and the batcher's story (``Batcher.story``).
    """

    told: Facts = field(default_factory=dict)

    def facts(self) -> Facts:
        return self.told


def batch_choice(replica: str, batch: FormedBatch, story: Facts) -> BatchChoice:
    """The choice of a replica whose worker pulled this batch."""
    reason = f"idle; pulled a batch of {len(batch)}"
    shape = {"batch_size": len(batch), "batch_len": batch.prompt_len, "generation_len": batch.predicted_len}
    return BatchChoice(replica, reason, told={"replica": replica, "reason": reason, **shape, **story})
