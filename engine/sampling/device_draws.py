"""Chooses tokens on a GPU: parameters in one copy, one launch that a recorded step can hold (``draw_kernel``)."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from farsight.core.request import SamplingParams
from farsight.engine.cuda import Mirrored
from farsight.engine.sampling.sampler import Sampler

_ROW = np.dtype(
    [
        *(("seed", np.uint64), ("position", np.int64), ("tail", np.float64)),
        *(("scale", np.float32), ("least_weight", np.float32), ("top_k", np.int32), ("greedy", np.int32)),
    ]
)
_LONGS = _ROW.itemsize // 8
_TILE, _LEAST_TILE = 4096, 64
_LEAST_SCALE, _LARGEST = 1e-44, float(np.finfo(np.float32).max)  # 0 * inf and inf * 0 would be NaN
_LOG2_E = math.log2(math.e)


class Draws(Protocol):
    """Draws tokens by work that a recorded step can hold.

    Attributes:
        max_rows: Rows that are drawn at once.
    """

    max_rows: int

    def fill(self, params: SequenceOf[SamplingParams], positions: SequenceOf[int]) -> None:
        """Launches the copy of a step's parameters to the device; the steps but the last before it have ended.

        Args:
            params: One a row, at most ``max_rows``.
            positions: Index of each new token in its sequence.
        """
        ...

    def draw(self, logits: Tensor, tokens: Tensor) -> None:
        """Draws with the parameters on the device.

        Args:
            logits: float32 ``[rows, vocab]``, each row in one piece.
            tokens: int64 ``[rows]``, where they are written; ``NO_TOKEN`` for a row without one.
        """
        ...


def row_parameters(params: SequenceOf[SamplingParams], vocab_size: int) -> np.ndarray:
    """Returns what the kernel reads of each row, but for the positions; 40 bytes a row."""
    rows = np.zeros(len(params), dtype=_ROW)
    rows["seed"] = [param.seed for param in params]
    rows["tail"] = [1 - param.top_p for param in params]
    rows["least_weight"] = [param.min_p for param in params]
    rows["top_k"] = [param.top_k if param.top_k < vocab_size else 0 for param in params]
    rows["greedy"] = [param.greedy for param in params]
    scales = [_LOG2_E / param.temperature if param.temperature else 1.0 for param in params]
    rows["scale"] = np.clip(scales, _LEAST_SCALE, _LARGEST)
    return rows


class DeviceDraws:
    """Draws by our own kernel (``Draws``), which is compiled when this is made.

    A padding row of a recorded step draws with the parameters of an earlier step; its token is not read.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        from farsight.engine.sampling.draw_kernel import draw_rows  # torch brings Triton where it has CUDA

        self.max_rows = max_rows
        self._kernel: Any = draw_rows
        self._vocab_size = vocab_size
        self._given = Mirrored(max_rows * _LONGS, torch.int64, device)
        self._ids = torch.empty(max_rows, vocab_size, dtype=torch.int32, device=device)
        self._params: list[SamplingParams] = []
        self._rows = np.zeros(max_rows, dtype=_ROW)
        self._tile = max(_LEAST_TILE, min(_TILE, 1 << (vocab_size - 1).bit_length()))
        self.draw(torch.zeros(1, vocab_size, device=device), torch.zeros(1, dtype=torch.int64, device=device))

    def fill(self, params: SequenceOf[SamplingParams], positions: SequenceOf[int]) -> None:
        """Launches the copy of a step's parameters, as ``Draws.fill``."""
        num_rows, rows = len(params), self._rows
        if params != self._params:  # what stays the same from step to step is laid out once
            self._params = list(params)
            rows[:num_rows] = row_parameters(self._params, self._vocab_size)
        rows["position"][:num_rows] = positions
        self._given.take().view(_ROW)[:num_rows] = rows[:num_rows]
        self._given.send(num_rows * _LONGS)

    def draw(self, logits: Tensor, tokens: Tensor) -> None:
        """Launches the kernel, as ``Draws.draw``."""
        given = self._given.there
        self._kernel[(len(logits),)](
            logits,
            self._ids,
            given,
            given.view(torch.float64),
            given.view(torch.float32),
            given.view(torch.int32),
            tokens,
            self._vocab_size,
            logits.stride(0),
            TILE=self._tile,
            num_warps=max(1, min(8, self._tile // 256)),
        )


class DeviceSampler(Sampler):
    """Like ``Sampler``, beside steps that draw tokens themselves; draws on the device what they do not.

    Rows whose logits a request changes are drawn behind the step: the changes are torch's, the draw is the kernel's.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], draws: Draws) -> None:
        super().__init__(eos_token_ids)
        self._draws = draws

    def settles(self, param: SamplingParams) -> bool:
        """Tells it of all rows whose tokens depend on nothing before them (``Sampler.settles``)."""
        return not param.looks_back

    def _draw(self, logits: Tensor, params: SequenceOf[SamplingParams], positions: SequenceOf[int]) -> Tensor:
        """Draws as many rows at once as there is memory for; waits for the tokens."""
        size, found = self._draws.max_rows, []
        for first in range(0, len(params), size):
            part = slice(first, first + size)
            # In memory of its own: a kernel is compiled for the alignment that it finds.
            scores = logits[part].clone() if first else logits
            tokens = torch.empty(min(size, len(params) - first), dtype=torch.int64, device=logits.device)
            self._draws.fill(params[part], positions[part])
            self._draws.draw(scores[: len(tokens)], tokens)
            found.append(tokens.cpu())  # the memory of the parameters is written again two parts later
        return torch.cat(found)
