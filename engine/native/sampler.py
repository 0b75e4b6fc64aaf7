"""Chooses tokens by the compiled step's library, on the threads of a model; see ``sampler.cpp``."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from ctypes import CDLL, Structure, byref, c_int32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from farsight.core.messages.tokens import TokenLogprobs
from farsight.core.request import SamplingParams
from farsight.engine.native.library import load_library
from farsight.engine.native.model import NativeModel
from farsight.engine.sampling.logit_adjustments import TokenHistory, forbidden_ids
from farsight.engine.sampling.sampler import Sampler
from farsight.engine.sampling.token_masks import MaskedRows

_LARGEST_TOP_K = 2**31 - 1
_POINTERS = ("seen", "counts", "num_seen", "biased", "biases", "num_biased", "allowed", "num_allowed")
_DRAW = np.dtype(  # FsDraw
    [
        *((name, np.float64) for name in ("temperature", "top_p", "min_p")),
        ("seed", np.uint64),
        *((name, np.int64) for name in ("position", "row", *_POINTERS, "forbidden", "num_forbidden", "mask")),
        ("top_k", np.int32),
        *((name, np.float32) for name in ("repetition", "presence", "frequency")),
    ]
)

_FIELDS = {name: name for name in ("temperature", "top_p", "min_p", "seed")} | {
    name: f"{name}_penalty" for name in ("repetition", "presence", "frequency")
}


class _Sample(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "draws", "tokens")),
        *((name, c_int32) for name in ("vocab", "num_rows")),
    )


class _Log(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "rows", "tokens", "num_top", "ids", "values")),
        *((name, c_int32) for name in ("vocab", "num_rows", "width")),
    )


class _Draws:
    """The draws of rows of the same parameters, step after step: what the tokens so far change is filled in.

    Args:
        params: One a row.
        rows: Those that are drawn.
    """

    def __init__(self, params: list[SamplingParams], rows: list[int], eos_token_ids: tuple[int, ...]) -> None:
        self.params = params
        self.rows = rows
        self._eos_token_ids = eos_token_ids
        self._kept: list[Any] = []  # arrays whose addresses are in `draws`
        self.draws = np.zeros(len(rows), dtype=_DRAW)
        self.tokens = np.empty(len(rows), dtype=np.int64)
        self._penalized = [place for place, row in enumerate(rows) if params[row].penalizes]
        self._restricted = [place for place, row in enumerate(rows) if params[row].min_tokens or params[row].bad_words]
        chosen = [params[row] for row in rows]
        draws = self.draws
        for name, of_params in _FIELDS.items():
            draws[name] = [getattr(param, of_params) for param in chosen]
        draws["row"] = rows
        draws["top_k"] = [min(param.top_k, _LARGEST_TOP_K) for param in chosen]
        for draw, param in zip(draws, chosen, strict=True):
            if param.logit_bias:
                ids, biases = zip(*param.logit_bias, strict=True)
                draw["biased"], draw["num_biased"] = self._keep(np.array(ids, dtype=np.int32)), len(ids)
                draw["biases"] = self._keep(np.array(biases, dtype=np.float32))
            if param.allowed_token_ids:
                draw["allowed"] = self._keep(np.array(param.allowed_token_ids, dtype=np.int32))
                draw["num_allowed"] = len(param.allowed_token_ids)

    def _keep(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return array.ctypes.data

    def fill(self, positions: SequenceOf[int], histories: SequenceOf[TokenHistory], masks: MaskedRows | None) -> Any:
        """Sets what depends on the tokens so far; returns what must live until they are drawn."""
        alive: list[Any] = [masks]
        draws = self.draws
        draws["position"] = [positions[row] for row in self.rows]
        for place in self._penalized:
            counts = histories[self.rows[place]].token_counts()
            ids, numbers = counts.ids, counts.counts
            alive += (ids, numbers)
            draw = draws[place]
            draw["seen"], draw["counts"], draw["num_seen"] = ids.ctypes.data, numbers.ctypes.data, len(ids)
        for place in self._restricted:
            row = self.rows[place]
            forbidden = np.array(forbidden_ids(self.params[row], histories[row], self._eos_token_ids), dtype=np.int32)
            alive.append(forbidden)
            draws[place]["forbidden"], draws[place]["num_forbidden"] = forbidden.ctypes.data, len(forbidden)
        draws["mask"] = 0
        if masks is not None:
            places = {row: place for place, row in enumerate(self.rows)}
            for row, bits in zip(masks.rows, masks.bits, strict=True):
                draws[places[row]]["mask"] = bits.ctypes.data
        return alive


class NativeSampler(Sampler):
    """Like ``Sampler``, for float32 logits in the host's memory.

    Args:
        model: Its threads choose; None for the caller's alone. Only one thread at a time may use it.

    Raises:
        NativeUnavailable: There is no compiler.
    """

    def __init__(self, eos_token_ids: tuple[int, ...] = (), model: NativeModel | None = None) -> None:
        super().__init__(eos_token_ids)
        self._library: CDLL = load_library()
        self._model = model
        self._draws = _Draws([], [], eos_token_ids)

    def sample(
        self,
        logits: Tensor,
        params: SequenceOf[SamplingParams],
        positions: SequenceOf[int],
        histories: SequenceOf[TokenHistory] = (),
        best: list[int] | None = None,
        masks: MaskedRows | None = None,
    ) -> list[int]:
        """See ``Sampler.sample``."""
        rows = [row for row, param in enumerate(params) if best is None or not param.plain]
        if not rows:
            return list(best or ())
        if rows != self._draws.rows or params != self._draws.params:
            self._draws = _Draws(list(params), rows, self._eos_token_ids)
        draws = self._draws
        alive = draws.fill(positions, histories, masks)
        logits = logits.contiguous()
        addresses = logits.data_ptr(), draws.draws.ctypes.data, draws.tokens.ctypes.data
        self._call("fs_sample", _Sample(*addresses, logits.shape[-1], len(rows)))
        del alive
        if best is None:
            return draws.tokens.tolist()
        tokens = list(best)
        for row, token in zip(rows, draws.tokens.tolist(), strict=True):
            tokens[row] = token
        return tokens

    def token_logprobs(
        self, logits: Tensor, rows: SequenceOf[int], tokens: SequenceOf[int], num_top: SequenceOf[int]
    ) -> list[TokenLogprobs]:
        """See ``Sampler.token_logprobs``."""
        logits = logits.contiguous()
        vocab_size = logits.shape[-1]
        width = min(max(num_top, default=0), vocab_size)
        values = np.empty((len(rows), 1 + width), dtype=np.float32)
        ids = np.empty((len(rows), width), dtype=np.int32)
        given = np.array([rows, tokens], dtype=np.int64)
        wanted = np.minimum(num_top, width).astype(np.int32)
        arrays = given[0], given[1], wanted, ids, values
        addresses = (array.ctypes.data for array in arrays)
        self._call("fs_log", _Log(logits.data_ptr(), *addresses, vocab_size, len(rows), width))
        return [
            ((token, *best[:count]), tuple(each[: 1 + count]))
            for token, count, best, each in zip(tokens, wanted.tolist(), ids.tolist(), values.tolist(), strict=True)
        ]

    def _call(self, name: str, arguments: Structure) -> None:
        """Calls a function of the library; the one thing that can fail is memory."""
        if getattr(self._library, name)(None if self._model is None else self._model.handle, byref(arguments)):
            raise MemoryError(f"{name}: out of memory")
