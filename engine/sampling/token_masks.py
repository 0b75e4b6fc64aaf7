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

from farsight.core.request import Fault
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import NoToken
from farsight.kvcache import StepItem


class MaskedRows(NamedTuple):
    """
    Attributes:
        rows: Rows of the step's logits.
        bits: A bit for each token, 1 if it is allowed; uint8 ``[len(rows), >= vocab / 8]``, whole words of 16 bits.
        problems: By row, why its grammar leaves no token.
    """

    rows: list[int]
    bits: NDArray[np.uint8]
    problems: dict[int, NoToken]

    def apply(self, logits: Tensor) -> Tensor:
        """Returns logits, float32 ``[rows, vocab]``, with -inf for forbidden tokens; NaN stays."""
        masked = logits.clone()
        for row, cap in zip(self.rows, caps_on(torch.from_numpy(self.bits).to(logits.device)), strict=True):
            torch.minimum(masked[row], cap[: masked.shape[1]], out=masked[row])
        return masked


def begin_masks(
    items: SequenceOf[StepItem], sequences: Mapping[str, Sequence], vocab_size: int
) -> Future[MaskedRows] | None:
    """Begins to find the masks of a step in a thread of its own.

    Args:
        items: Those that sample, in the order of their rows: one row each, and one for each draft.

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
    return _thread().submit(_find_masks, jobs, vocab_size) if jobs else None


class _Job(NamedTuple):
    row: int
    sequence: Sequence
    drafts: tuple[int, ...]


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "token-masks")


def _find_masks(jobs: list[_Job], vocab_size: int) -> MaskedRows:
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
    num_bytes = 2 * -(-vocab_size // 16)
    bits = np.zeros((len(rows), num_bytes), np.uint8)
    for place, mask in zip(bits, masks, strict=True):
        data = np.frombuffer(mask, np.uint8)[:num_bytes]
        place[: len(data)] = data
    return MaskedRows(rows, bits, problems)


def caps_on(bits: Tensor) -> Tensor:
    """Returns the caps of bits on a device, which are smaller to copy; float32 ``[rows, 8 * bytes]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    is_allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1).bool()
    caps = torch.full(is_allowed.shape, float("-inf"), device=bits.device)
    return caps.masked_fill_(is_allowed, float("inf"))


def _no_token(sequence: Sequence) -> NoToken:
    matcher = sequence.matcher
    why = sequence.grammar_problem or (matcher.problem if matcher is not None else "") or "no text follows the output"
    index = len(sequence.token_ids) - sequence.prompt_len
    return NoToken(f"output token {index} cannot be chosen: the grammar allows none: {why}", Fault.REQUEST)
