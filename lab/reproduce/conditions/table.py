"""Tables of one-factor changes: a row for each condition and metric, with ours for each seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from lab.reproduce.rows import Check, Draws, Figure, OrderCheck, Printed, Reproduction, Row

Condition = TypeVar("Condition")

SEEDS = (2, 3, 4)

AS_IS = "as reproduced"
"""The condition in which nothing is changed."""


def conditions(
    name: str,
    source: str,
    settings: Mapping[str, Condition],
    measure: Callable[[Condition, int], dict[str, float]],
    wanted: Mapping[str, Figure | float],
    seeds: Sequence[int] = SEEDS,
) -> Reproduction:
    """Declares a table, with a cell for each condition.

    Args:
        settings: Conditions by what is changed.
        measure: Returns ours by metric, for a condition and a seed.
        wanted: The printed figure of each metric, or what ours must exceed for the printed order.
    """
    return Reproduction(
        name, source, tuple(partial(_rows, name, what, measure, each, wanted, seeds) for what, each in settings.items())
    )


def _rows(
    name: str,
    what: str,
    measure: Callable[[Condition, int], dict[str, float]],
    condition: Condition,
    wanted: Mapping[str, Figure | float],
    seeds: Sequence[int],
) -> list[Row]:
    found = [measure(condition, seed) for seed in seeds]
    rows = []
    for metric, printed in wanted.items():
        values = tuple(each[metric] for each in found)
        ours = float(np.mean(values))
        rows.append(Row(name, what, metric, _check(printed, ours), ours, "", Draws(len(values), values)))
    return rows


def _check(printed: Figure | float, ours: float) -> Check:
    return Printed(printed) if isinstance(printed, Figure) else OrderCheck(ours > printed, bound=printed)
