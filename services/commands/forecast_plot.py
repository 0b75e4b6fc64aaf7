"""A plot of forecasts against true output lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from farsight.core.forecast import QUANTILES, Forecast
from farsight.predictor.metrics import Scores

_MAX_POINTS = 4000
"""Most points drawn; more would cover each other."""


def write_plot(
    path: Path, forecasts: Sequence[Forecast], output_lens: Sequence[int], tasks: Sequence[str], scores: Scores
) -> None:
    """Left: forecast medians against true lengths, by task. Right: share of outputs up to each quantile.

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
