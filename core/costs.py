"""What a step costs: the one model that every policy prices with, linear in what the step does."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass

from farsight.core.errors import InvalidValueError
from farsight.core.messages.step_times import ReplicaStepProfile


def attention_pairs(num_tokens: int, start: int) -> int:
    """Counts the pairs (prompt token, token it attends to) of ``num_tokens`` computed from position ``start`` on."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, ``base_s`` plus a share of each kind of work in it (the form of ``StepProfile``).

    Attributes:
        base_s: Seconds of every step, whatever it computes.
        prefill_token_s: Seconds of each prompt token computed.
        decode_seq_s: Seconds of each sequence that decodes.
        context_token_s: Seconds of each token of context that a decoding sequence reads.
        prefill_pair_s: Seconds of each pair of ``attention_pairs``: a prompt token costs more the more context it has.
    """

    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    context_token_s: float
    prefill_pair_s: float = 0.0

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_pairs: int = 0) -> float:
        """Returns the seconds of one step; ``context_tokens`` counts the context of the sequences that decode."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_seq_s * decode_seqs
            + self.context_token_s * context_tokens
            + self.prefill_pair_s * prefill_pairs
        )

    def prefill_s(self, num_tokens: int, cached_len: int = 0) -> float:
        """Returns the seconds to compute ``num_tokens`` prompt tokens in a step of their own: a job's first iteration.

        Args:
            cached_len: Tokens before them whose KV is in memory.
        """
        return self.step_s(num_tokens, 0, 0, attention_pairs(num_tokens, cached_len))

    def decode_run_s(self, decode_seqs: int, context_tokens: int, num_steps: int) -> float:
        """Returns the seconds of ``num_steps`` steps that only decode.

        The first step reads ``context_tokens``; each token adds to the next step's context.
        """
        growth_s = self.context_token_s * decode_seqs
        return num_steps * self.step_s(0, decode_seqs, context_tokens) + growth_s * num_steps * (num_steps - 1) / 2

    def decode_s(self, context_tokens: int) -> float:
        """Returns the seconds of one output token of a sequence that decodes alone."""
        return self.step_s(0, 1, context_tokens)

    def is_like(self, other: StepCost, share: float) -> bool:
        """Returns whether three prices differ by at most ``share`` of ``other``'s: a lone decode, a batch, a prompt."""
        steps = ((0, 1, 500, 0), (0, 64, 32_000, 0), (512, 0, 0, attention_pairs(512, 0)))
        prices = ((self.step_s(*step), other.step_s(*step)) for step in steps)
        return all(abs(mine - theirs) <= share * theirs for mine, theirs in prices)


@dataclass(frozen=True, slots=True)
class ImageCost:
    """Seconds that an image encoder takes for a batch of pictures, beside the steps.

    Attributes:
        batch_s: Seconds of every batch.
        token_s: Seconds of each token of its pictures.
        pair_s: Seconds of each pair of tokens of one picture, within which a tower attends.
    """

    batch_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch_s", "token_s", "pair_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidValueError(f"image_{name}", getattr(self, name), "seconds >= 0")

    @property
    def is_free(self) -> bool:
        """Whether no picture takes any time, as where nothing is known of the encoder."""
        return not (self.batch_s or self.token_s or self.pair_s)

    def encode_s(self, tokens: Sequence[int]) -> float:
        """Returns the seconds of a batch of pictures of so many tokens each; 0 for an empty batch."""
        if not tokens:
            return 0.0
        return self.batch_s + self.token_s * sum(tokens) + self.pair_s * sum(each * each for each in tokens)


FREE_IMAGES = ImageCost()
"""Cost of pictures where there is no encoder, or nothing is known of its speed."""


BASE_SHARE = 0.1
"""Share of a step that ``base_s`` may take: what more rows than ``priced_rows`` could gain in tokens a second."""

FEWEST_ROWS = 4
"""Fewest rows that are worth a step, however cheap ``base_s`` is."""


def priced_rows(cost: StepCost, context_len: float, most: int) -> int:
    """Returns the fewest sequences with which ``base_s`` takes ``BASE_SHARE`` of a step that decodes.

    More of them yield next to no more tokens a second: they make all others slower.

    Args:
        context_len: Mean context of a sequence, in tokens.
        most: The engine's limit, which is the answer where a sequence costs nothing of its own.
    """
    row_s = cost.decode_seq_s + cost.context_token_s * context_len
    if row_s <= 0:
        return most
    return min(most, max(FEWEST_ROWS, math.ceil((1 - BASE_SHARE) / BASE_SHARE * cost.base_s / row_s)))


def row_shares(
    cost: StepCost, rows: Iterable[tuple[int, int]], max_num_seqs: int, capacity: int, num_steps: int = 1
) -> list[float]:
    """Divides the time of steps among their rows by price; the shares add up to 1.

    The price of a row is the cost of its own work plus a part of ``base_s``, which all rows use together. That part is
    the row's dominant share: the larger of 1 / max_num_seqs and its part of the KV memory.
    ``policies.order.gittins.DecodePrice`` ranks by the same price.

    Args:
        rows: (first position, number of tokens) of each row; a row of one token decodes.
        capacity: Tokens of KV on the device.
        num_steps: Steps of the same rows; rows that decode grow by a token in each.
    """
    slot_share = 1.0 / max_num_seqs
    grown = (num_steps - 1) / 2
    prices = []
    for start, num_tokens in rows:
        context = start + num_tokens + grown
        share = context / capacity
        price = cost.base_s * (share if share > slot_share else slot_share)
        if num_tokens == 1:
            price += cost.decode_seq_s + cost.context_token_s * context
        else:
            price += cost.prefill_token_s * num_tokens + cost.prefill_pair_s * attention_pairs(num_tokens, start)
        prices.append(price)
    total = sum(prices)
    if total <= 0:
        return [1.0 / len(prices) for _ in prices]
    return [price / total for price in prices]


def mean_cost(costs: Collection[StepCost]) -> StepCost:
    """Returns the cost whose prices are the means of the given costs' prices; needs at least one cost."""
    return StepCost(*(sum(terms) / len(costs) for terms in zip(*map(astuple, costs), strict=True)))


A100_7B = StepCost(base_s=0.010, prefill_token_s=0.11e-3, decode_seq_s=0.02e-3, context_token_s=0.2e-6)
"""Approximate cost of a 7B model on an A100."""


def profile_cost(profile: ReplicaStepProfile) -> StepCost:
    """Returns the prices of a measured profile."""
    return StepCost(
        profile.base_s, profile.prefill_token_s, profile.decode_seq_s, profile.context_token_s, profile.prefill_pair_s
    )
