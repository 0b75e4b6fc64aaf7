"""The record of a mixture of experts: how a token's experts are chosen, how many there are, and on which layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.checkpoint.config_fields import Fields


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of which each token takes a few. A router scores all of them, linearly, from the MLP's input.

    To choose the largest values of a softmax and to normalise them is the same as a softmax of the largest logits, so
    families of both orders have one record.

    Attributes:
        count: Experts of a layer.
        active: Experts that each token takes.
        inner: Width of one expert.
        layers: By layer: whether it has experts; the others have a plain MLP.
        scores: What makes a weight of a logit.
        normalized: Whether the weights of a token's experts are divided by their sum.
        scale: Factor of the weights.
        shared_inner: Width of the experts that every token takes, as one MLP; 0 without.
        groups, active_groups: Experts lie in so many groups of one size; a token takes experts of so many of them, of
            those whose ``group_best`` best scores have the largest sums.
        correction: Whether a learned number is added to each score, for the choice alone.
        router_bias: Whether the router adds a bias.
        shared_gate: Whether what they give is multiplied by a sigmoid of a linear function of the input.
    """

    count: int
    active: int
    inner: int
    layers: tuple[bool, ...]
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    shared_inner: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    groups: int = 1
    active_groups: int = 1
    group_best: int = 1
    correction: bool = False

    @property
    def router_rows(self) -> int:
        """Outputs of the router, the gate of the shared experts among them."""
        return self.count + self.shared_gate


def chosen_experts(config: Fields, count: str, active: str) -> tuple[int, int]:
    """How many experts there are and how many a token takes, by the names of the two fields.

    Raises:
        UnsupportedModelError: No such sizes, or more active experts than there are.
    """
    experts = config.size(count, 1 << 16)
    taken = config.size(active)
    if taken > experts:
        raise config.error(active, f"at most the {experts} experts")
    return experts, taken
