"""Which tokens the grammars of a step's sequences allow: found in a thread while the step computes.

A mask is a function of the grammar and the output so far alone, so a sequence that is resumed, moved or batched with
others gets the same masks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.request import Fault, SamplingParams
from engine.sampling.logged_tokens import NoToken
from engine.sequence import Sequence
from kvcache import StepItem


class _Masked(NamedTuple):
    """
    Attributes:
        rows: Rows of the step's logits.
        caps: The largest logit of each token, +inf if it is allowed, else -inf; float32 ``[len(rows), >= vocab]``.
            On a device: a bit for each token, 1 if it is allowed; uint8 ``[len(rows), ceil(vocab / 8)]``.
        problems: By row, why its grammar leaves no token.
    """

    rows: list[int]
    caps: Tensor
    problems: dict[int, NoToken]


class KeptRows(NamedTuple):
    """Logits of some rows, float32 ``[len(rows), vocab]``, as the model computed them."""

    rows: list[int]
    logits: Tensor

    def restore(self, logits: Tensor) -> None:
        """Puts them back."""
        for row, values in zip(self.rows, self.logits, strict=True):
            logits[row] = values


class TokenMasks:
    """The masks of one step.

    Attributes:
        problems: By row, why it gets no token; known after ``apply``.
    """

    def __init__(self, found: Future[_Masked]) -> None:
        self._found = found
        self.problems: dict[int, NoToken] = {}

    def apply(self, logits: Tensor, params: SequenceOf[SamplingParams]) -> KeptRows | None:
        """Sets the logits of forbidden tokens to -inf; waits for the masks where they are not ready.

        Args:
            logits: float32 ``[rows, vocab]``; changed.
            params: One a row.

        Returns:
            The rows of which log probabilities are wanted: those are of the model's own distribution.
        """
        rows, caps, self.problems = self._found.result()
        logged = [row for row in rows if params[row].logprobs is not None]
        kept = KeptRows(logged, logits[logged].clone()) if logged else None
        if caps.dtype == torch.uint8:
            caps = caps_on(caps.to(logits.device))
        for row, cap in zip(rows, caps, strict=True):
            scores = logits[row]
            torch.minimum(scores, cap[: len(scores)], out=scores)  # far faster than a fill by a mask
        return kept


def begin_masks(
    items: SequenceOf[StepItem], sequences: Mapping[str, Sequence], vocab_size: int, *, on_cpu: bool = True
) -> TokenMasks | None:
    """Begins to find the masks of a step in a thread of its own.

    Args:
        items: Those that sample, in the order of their rows: one row each, and one for each draft.
        on_cpu: Whether the logits are in the host's memory.

    Returns:
        None if none of the sequences follows a grammar or has a budget.
    """
    jobs: list[_Job] = []
    row = 0
    for item in items:
        sequence = sequences[item.request_id]
        if sequence.sampling.is_followed:
            jobs.append(_Job(row, sequence, item.drafts))
        row += 1 + len(item.drafts)
    return TokenMasks(_thread().submit(_find_masks, jobs, vocab_size, on_cpu)) if jobs else None


class _Job(NamedTuple):
    row: int
    sequence: Sequence
    drafts: tuple[int, ...]


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "token-masks")


def _find_masks(jobs: list[_Job], vocab_size: int, on_cpu: bool) -> _Masked:
    rows: list[int] = []
    masks: list[bytes] = []
    problems = {}
    for job in jobs:
        matcher = job.sequence.current_matcher()
        found = [b""] if matcher is None else matcher.allowed_after(job.drafts)
        for row, mask in enumerate(found, job.row):
            rows.append(row)
            masks.append(mask)
            if not any(mask):
                problems[row] = _no_token(job.sequence)
    num_bytes = -(-vocab_size // 8)
    bits = np.zeros((len(rows), num_bytes), np.uint8)
    for place, mask in zip(bits, masks, strict=True):
        data = np.frombuffer(mask, np.uint8)[:num_bytes]
        place[: len(data)] = data
    caps = np.take(_caps_of_bytes(), bits, axis=0).reshape(len(rows), -1) if on_cpu else bits
    return _Masked(rows, torch.from_numpy(caps), problems)


@functools.cache
def _caps_of_bytes() -> NDArray[np.float32]:
    """Float32 ``[256, 8]``."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32("inf"), np.float32("-inf"))


def caps_on(bits: Tensor) -> Tensor:
    """The caps of bits on a device, which are smaller to copy; float32 ``[rows, 8 * bytes]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    is_allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1).bool()
    caps = torch.full(is_allowed.shape, float("-inf"), device=bits.device)
    return caps.masked_fill_(is_allowed, float("inf"))


def _no_token(sequence: Sequence) -> NoToken:
    matcher = sequence.matcher
    why = sequence.grammar_problem or (matcher.problem if matcher is not None else "") or "no text follows the output"
    index = len(sequence.token_ids) - sequence.prompt_len
    return NoToken(f"output token {index} cannot be chosen: the grammar allows none: {why}", Fault.REQUEST)
