"""Why a batch holds the requests that it holds, and why it ran before the others: what an explanation shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.decisions import Facts
from policies.batching.base import FormedBatch
from policies.placement.base import Choice


@dataclass(frozen=True, slots=True)
class BatchChoice(Choice):
    """An idle worker pulled the batch of a request.

    Attributes:
        batch_size: Requests in it.
        batch_len: L(B): its longest prompt, in tokens; ``generation_len`` is G(B), its longest predicted output.
        own_generation_len: G(p), the predicted output of this request.
        story: What the batcher knows beside that (``Batcher.story``).
    """

    batch_size: int = 0
    batch_len: int = 0
    generation_len: int = 0
    own_generation_len: int = 0
    story: Mapping[str, float | str] = field(default_factory=dict)

    def facts(self) -> Facts:
        """All fields by name, and the story's."""
        names = ("replica", "reason", "batch_size", "batch_len", "generation_len", "own_generation_len")
        return {name: getattr(self, name) for name in names} | dict(self.story)


def batch_choices(replica: str, batch: FormedBatch, story: Facts) -> list[BatchChoice]:
    """One for each request of a pulled batch, in its order."""
    reason = f"idle; pulled a batch of {len(batch)}"
    shape = len(batch), batch.prompt_len, batch.predicted_len
    return [BatchChoice(replica, reason, 0, 0, *shape, own, story) for own in batch.predicted_lens]
