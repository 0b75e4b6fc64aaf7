"""The optimiser of both stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

WARM_UP_STEPS: Final = 40
FINAL_SHARE: Final = 0.03
"""Share of the peak rate at the end."""
WEIGHT_DECAY: Final = 0.05


def build_optimizer(parts: Sequence[tuple[Sequence[nn.Module], float]]) -> torch.optim.AdamW:
    """AdamW over modules, each group with its peak rate; weight decay on the matrices alone."""
    groups: list[dict[str, Any]] = []
    for modules, peak in parts:
        parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
        matrices, vectors = ([p for p in parameters if (p.ndim > 1) is wide] for wide in (True, False))
        groups.append({"params": matrices, "weight_decay": WEIGHT_DECAY, "peak": peak, "lr": 0.0})
        groups.append({"params": vectors, "weight_decay": 0.0, "peak": peak, "lr": 0.0})
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def set_rate(optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Linear warm-up, then a cosine down to ``FINAL_SHARE`` of each group's peak."""
    warm_up = min(WARM_UP_STEPS, steps // 10)
    if step < warm_up:
        share = (step + 1) / warm_up
    else:
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        share = FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done))
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share
