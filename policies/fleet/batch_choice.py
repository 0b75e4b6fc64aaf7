"""Why a batch holds the requests that it holds, and why it ran before the others: what an explanation shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.decisions import Facts
from policies.batching.base import FormedBatch
from policies.placement.base import Choice


@dataclass(frozen=True, slots=True)
class BatchChoice(Choice):
    """An idle worker pulled a batch: the choice for one of its requests.

    Attributes:
        told: The batch's facts: ``batch_size`` requests, ``batch_len`` L(B) and ``generation_len`` G(B), its longest
            prompt and its longest predicted output in tokens, and the batcher's story (``BatchPolicy.story``).
        counted_len: G(p), the output tokens that the request counted with when batches were formed and chosen.
        counted_by: Source of ``counted_len``: that of the forecast, or ``max_tokens`` without one.
    """

    told: Facts = field(default_factory=dict)
    counted_len: int = 0
    counted_by: str = ""

    def facts(self) -> Facts:
        return {**self.told, "counted_tokens": self.counted_len, "counted_by": self.counted_by}


def batch_choices(replica: str, batch: FormedBatch, story: Facts) -> list[BatchChoice]:
    """Returns the choice of a replica whose worker pulled this batch, for each of its jobs in order."""
    reason = f"idle; pulled a batch of {len(batch)}"
    shape = {"batch_size": len(batch), "batch_len": batch.prompt_len, "generation_len": batch.predicted_len}
    told = {"replica": replica, "reason": reason, **shape, **story}
    return [
        BatchChoice(
            replica,
            reason,
            told=told,
            counted_len=length,
            counted_by="max_tokens" if job.forecast is None else job.forecast.source,
        )
        for job, length in zip(batch.jobs, batch.predicted_lens, strict=True)
    ]
