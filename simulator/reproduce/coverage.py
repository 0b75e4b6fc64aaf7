"""The papers' figures and tables with results that no reproduction covers, by number, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gap:
    """What is not run again.

    Attributes:
        what: Figure or table, by its number.
        why: What would be needed, or what is done in its place.
    """

    paper: str
    what: str
    why: str


GAPS: tuple[Gap, ...] = (
    Gap("Magnus", "Fig 2", "lengths of inputs and outputs of three models, which are not at hand"),
    Gap("Magnus", "Table I", "correlations of those lengths; the ones of ChatGLM-6B are put in, not found"),
    Gap("Magnus", "Table II", "errors of the length predictors; run on other models' outputs in results_forecasts.md"),
    Gap("Magnus", "Fig 14", "errors of predictor and estimator over hours of learning; the estimator here is exact"),
    Gap("Multi-Bin", "Fig 1 (a)", "throughput of a device by batch size; the latency model takes it from data sheets"),
    Gap("Multi-Bin", "Fig 5", "seconds a token of a device; its 0.0366 s are put in"),
    Gap("Multi-Bin", "Fig 10", "confusion matrices of a BERT, printed as colours; its accuracies are put in"),
    Gap("Past-Future", "Fig 3 (a) to (e)", "BurstGPT and the authors' traces; other public traces in their place"),
    Gap("Past-Future", "Fig 7, 13B and 70B", "the 7B model alone is run, on two distributions and a fitted one"),
    Gap("Past-Future", "Fig 9", "other frameworks on several devices, which are not simulated"),
    Gap("Past-Future", "Table 2", "throughput of multimodal models, which the engine does not serve"),
    Gap("Preble", "Fig 1 and 2", "prefill and decode times of an A6000; the authors' constants are put in"),
    Gap("Preble", "Table 1, Fig 4 and 5", "statistics of workloads; the means are put in, the data is not at hand"),
    Gap(
        "Preble",
        "Fig 7, oracle partition",
        "held against round-robin; the oracle partition is in Fig 10",
    ),
    Gap("Preble", "Fig 9", "vLLM as the engine under Preble, which is not simulated"),
)
"""Drawings of how a system works (Magnus Figs 1, 3 to 5 and 7 to 9 and so on) have no results and are not listed."""


def gap_lines() -> list[str]:
    return [f"{gap.paper}, {gap.what}: {gap.why}" for gap in GAPS]
