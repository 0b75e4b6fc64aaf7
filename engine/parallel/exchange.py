"""What a rank gives and takes while it computes a step, in memory that is set aside.

Which sums, activations and logits the ranks exchange in a step follows from its order alone. So a rank that cannot
compute its part, for it has no memory left, does not leave the others waiting: it takes part in every exchange that is
still to come, with zeros from here, and says afterwards that the step has come to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.config.engine import EngineConfig
from engine.parallel.group import Arrival, RankGroup
from engine.parallel.mesh import Part

_SUMS_PER_LAYER = 2
"""Attention and MLP (``engine.models.model.DecoderLayers``)."""


class Exchange:
    """The exchanges of one step after the other.

    Zeros and not anything: what the others make of them lands in blocks whose unused slots are multiplied with 0.

    Args:
        dtype: Of activations.
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
            torch.OutOfMemoryError: there is no room for them; nothing is on its way then.
        """
        buffer = self._zeros(num_rows) if blank else self._blank.new_empty(num_rows, self._blank.shape[1])
        return self._group.receive(buffer)

    def begin(self, num_rows: int) -> None:
        """A step of so many rows is computed from here on."""
        self._num_rows = num_rows
        self._sums_left = self._num_sums

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum over the columns of this stage, in place."""
        if self._num_sums:
            self._sums_left -= 1
            self._group.add_up(partial)
        return partial

    def sit_out(self) -> None:
        """Gives zeros to the sums that are left of the step."""
        while self._sums_left:
            self.add_up(self._zeros(self._num_rows))

    def send(self, hidden: Tensor | None) -> None:
        """Activations to the next stage, zeros without them."""
        self._group.send(self._zeros(self._num_rows) if hidden is None else hidden)

    def gather(self, part: Tensor | None, num_rows: int, whole: Tensor | None) -> None:
        """Puts the columns' logits side by side on rank 0: ``[num_rows, share]`` of each, anything without them.

        Args:
            whole: Where to, on rank 0: float32 ``[num_rows, vocab]``; None if they are of no use.
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
