"""How good forecasts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farsight.core.forecast import QUANTILES, Forecast

COVERED_LEVELS = (0.1, 0.5, 0.9)
"""Quantiles whose coverage is reported."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of forecasts against true output lengths.

    Attributes:
        n: Number of forecasts.
        rmse: Root mean square error of the means, in tokens.
        mae: Mean absolute error of the medians, which minimise it, in tokens.
        tau: Kendall's tau-b between rank scores and lengths, in [-1, 1]; 0 where one of them is constant.
        pinball: Mean pinball loss over ``QUANTILES``, in tokens.
        coverage: By level, the share of outputs up to that quantile.
    """

    n: int
    rmse: float
    mae: float
    tau: float
    pinball: float
    coverage: dict[str, float]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def score(forecasts: Sequence[Forecast], output_lens: Sequence[int]) -> Scores:
    """Computes all scores; zeros without forecasts. O(n log n)."""
    if not forecasts:
        return Scores(0, 0.0, 0.0, 0.0, 0.0, dict.fromkeys(map(str, COVERED_LEVELS), 0.0))
    lens = np.asarray(output_lens, np.float64)
    quantiles = np.array([each.quantiles for each in forecasts])
    ranks = [each.mean if each.rank is None else each.rank for each in forecasts]
    coverage = {str(level): coverage_of(quantiles[:, QUANTILES.index(level)], lens) for level in COVERED_LEVELS}
    return Scores(
        n=len(forecasts),
        rmse=rmse([each.mean for each in forecasts], lens),
        mae=float(np.abs(quantiles[:, QUANTILES.index(0.5)] - lens).mean()),
        tau=kendall_tau(ranks, lens),
        pinball=pinball(quantiles, lens),
        coverage=coverage,
    )


def rmse(predicted: ArrayLike, actual: ArrayLike) -> float:
    """Computes the root mean square error."""
    return float(np.sqrt(np.mean((np.asarray(predicted, np.float64) - np.asarray(actual, np.float64)) ** 2)))


def pinball(quantiles: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """Averages max(q·(y - x), (q - 1)·(y - x)) over rows and levels, for a quantile x at level q.

    Args:
        quantiles: (rows, len(QUANTILES)).
        actual: (rows,).
    """
    above = actual[:, None] - quantiles
    levels = np.array(QUANTILES)
    return float(np.maximum(levels * above, (levels - 1) * above).mean())


def coverage_of(quantile: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """Returns the share of ``actual`` up to ``quantile``; a length equal to its quantile counts half.

    Lengths are whole numbers and often equal a quantile: counted in full or not at all, they would miss the level.
    """
    return float(np.mean((actual < quantile) + 0.5 * (actual == quantile)))


def kendall_tau(scores: ArrayLike, actual: ArrayLike) -> float:
    """Computes Kendall's tau-b; 0 where one side is constant."""
    from scipy.stats import kendalltau

    if np.ptp(np.asarray(scores)) == 0 or np.ptp(np.asarray(actual)) == 0:
        return 0.0
    return float(kendalltau(scores, actual).statistic)


_MAX_POINTS = 4000
"""Most points drawn; more would cover each other."""


def write_plot(
    path: Path, forecasts: Sequence[Forecast], output_lens: Sequence[int], tasks: Sequence[str], scores: Scores
) -> None:
    """Draws, left: forecast medians against true lengths, by task. Right: share of outputs up to each quantile.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    lens = np.asarray(output_lens, np.float64)
    quantiles = np.array([each.quantiles for each in forecasts])
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    chosen = np.random.default_rng(0).permutation(len(lens))[:_MAX_POINTS]
    medians, labels = quantiles[:, QUANTILES.index(0.5)], np.array(tasks)
    for task in sorted(set(tasks)):
        rows = chosen[labels[chosen] == task]
        left.plot(lens[rows] + 1, medians[rows] + 1, ".", markersize=4, alpha=0.5, label=task or "requests")
    ends = [0.8 * (1 + min(lens.min(), medians.min())), 1.2 * (1 + max(lens.max(), medians.max()))]
    left.plot(ends, ends, color="black", linewidth=0.8, label="forecast = truth")
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    left.set(xlabel="output length + 1, tokens", ylabel="median forecast + 1, tokens")
    left.set_title(
        f"{scores.n} requests: RMSE {scores.rmse:.0f}, MAE {scores.mae:.0f} tokens, Kendall tau {scores.tau:.2f}"
    )
    left.legend(markerscale=2, fontsize="small", loc="upper left")
    covered = [(lens < column).mean() + 0.5 * (lens == column).mean() for column in quantiles.T]
    right.plot([0, 1], [0, 1], color="black", linewidth=0.8, label="as forecast")
    right.plot(QUANTILES, covered, "o-", label="measured")
    right.set(xlim=(0, 1), ylim=(0, 1), xlabel="level of the forecast quantile", ylabel="share of outputs up to it")
    right.set_title("Do the quantiles hold?")
    right.legend(loc="upper left")
    figure.savefig(path, dpi=120)
