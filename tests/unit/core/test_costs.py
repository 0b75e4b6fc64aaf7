"""What steps cost: when two models say the same."""

from __future__ import annotations

import dataclasses

from core.costs import StepCost


def test_two_models_are_alike_if_they_price_every_kind_of_step_alike() -> None:
    cost = StepCost(0.01, 1e-4, 1e-3, 1e-6, 1e-9)
    assert cost.is_like(cost, 0.0)
    for field in ("base_s", "prefill_token_s", "decode_seq_s", "context_token_s", "prefill_pair_s"):
        dearer = dataclasses.replace(cost, **{field: 1000 * getattr(cost, field)})
        assert not dearer.is_like(cost, 0.05) and not cost.is_like(dearer, 0.05)
    assert dataclasses.replace(cost, base_s=0.0101).is_like(cost, 0.05)
