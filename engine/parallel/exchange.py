"""The data that ranks exchange in a step, in memory that is set aside.

A step's order alone determines which sums, activations and logits the ranks exchange. So a rank that has no memory for
its part does not leave the others waiting: it takes part in every remaining exchange with zeros from here, and reports
afterwards that the step failed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.config.engine import EngineConfig
from engine.parallel.group import Arrival, RankGroup
from engine.parallel.mesh import Part

_SUMS_PER_LAYER = 2
"""Sums of a layer: attention and MLP (``engine.models.layers.DecoderLayers``)."""


class Exchange:
    """The exchanges of one step after the other.

    The zeros matter: the others' results land in blocks whose unused slots are multiplied with 0.

    Args:
        dtype: Dtype of the activations.
    """

    def __init__(self, group: RankGroup, part: Part, engine: EngineConfig, dtype: torch.dtype) -> None:
        self._group = group
        self._num_sums = _SUMS_PER_LAYER * len(part.layers) if part.mesh.tensor > 1 else 0
        self._sums_left = 0
        self._num_rows = 0
        device = torch.device(engine.device)
        num_rows = max(engine.max_batch_tokens, engine.max_num_seqs)
        self._blank = torch.zeros(num_rows, part.config.hidden_size, dtype=dtype, device=device)
        self._shares: list[Tensor] | None = None
        if part.is_last and part.mesh.tensor > 1:
            share = -(-part.whole.vocab_size // part.mesh.tensor)
            self._own = torch.zeros(engine.max_num_seqs, share, dtype=torch.float32, device=device)
            if part.rank == 0:
                self._shares = [torch.zeros_like(self._own) for _ in range(part.mesh.tensor)]

    def receive(self, num_rows: int, *, blank: bool) -> Arrival:
        """Activations from the stage before, in the order in which it sends; ``blank`` if they are of no use here.

        Raises:
            torch.OutOfMemoryError: There is no room for them; then no transfer has started.
        """
        buffer = self._zeros(num_rows) if blank else self._blank.new_empty(num_rows, self._blank.shape[1])
        return self._group.receive(buffer)

    def begin(self, num_rows: int) -> None:
        """Begins a step of so many rows."""
        self._num_rows = num_rows
        self._sums_left = self._num_sums

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum over the columns of this stage, in place."""
        if self._num_sums:
            self._sums_left -= 1
            self._group.add_up(partial)
        return partial

    def sit_out(self) -> None:
        """Adds zeros to the remaining sums of the step."""
        while self._sums_left:
            self.add_up(self._zeros(self._num_rows))

    def send(self, hidden: Tensor | None) -> None:
        """Sends activations to the next stage; zeros if there are none."""
        self._group.send(self._zeros(self._num_rows) if hidden is None else hidden)

    def gather(self, part: Tensor | None, num_rows: int, whole: Tensor | None) -> None:
        """Gathers the columns' logits on rank 0: ``[num_rows, share]`` of each, arbitrary values if it has none.

        Args:
            whole: The target on rank 0, float32 ``[num_rows, vocab]``; None if the logits are not needed.
        """
        size = len(self._own)
        for first in range(0, num_rows, size):
            rows = slice(first, min(first + size, num_rows))
            own = self._own[: rows.stop - first]
            shares = None if self._shares is None else [share[: len(own)] for share in self._shares]
            if part is not None:
                own[:, : part.shape[1]].copy_(part[rows])
            self._group.gather(own, shares)
            if whole is not None and shares is not None:
                for share, target in zip(shares, torch.split(whole[rows], own.shape[1], 1), strict=False):
                    target.copy_(share[:, : target.shape[1]])

    def _zeros(self, num_rows: int) -> Tensor:
        assert num_rows <= len(self._blank), "no step has more rows than a step may compute tokens"
        return self._blank[:num_rows].zero_()
