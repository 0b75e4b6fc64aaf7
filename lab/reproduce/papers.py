"""The five papers by figure and table: what runs each one again, or why nothing does."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure or table of a paper.

    Attributes:
        number: As the paper counts it, such as ``Fig 9 (a)``.
        reproduction: Its name in the register; empty if nothing runs it.
        settings: Regular expression that finds the settings of its rows; empty for all rows of the reproduction.
        command: What runs it, if ``reproduction`` is not in the register but names its stored rows alone.
        why: Why nothing runs it, or what stands in the place of its data.
        result: False for a drawing of how a system works, which has no result.
    """

    number: str
    what: str
    reproduction: str = ""
    settings: str = ""
    command: str = ""
    why: str = ""
    result: bool = True

    @property
    def key(self) -> str:
        """A name for files."""
        return re.sub(r"[^a-z0-9]+", "_", self.number.lower()).strip("_")

    def shows(self, setting: str) -> bool:
        """Whether a row with this setting belongs to the figure."""
        return re.search(self.settings, setting) is not None


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper.

    Attributes:
        page: Its page under ``docs``.
        conditions: Names in the register of what was changed to find causes.
    """

    name: str
    page: str
    figures: tuple[PaperFigure, ...]
    conditions: tuple[str, ...] = ()

    @property
    def reproductions(self) -> list[str]:
        """Names in the register, in the order of the figures."""
        return list(dict.fromkeys(figure.reproduction for figure in self.figures if figure.reproduction))


def _drawing(number: str, what: str) -> PaperFigure:
    return PaperFigure(number, what, why="a drawing without results", result=False)


MAGNUS = Paper(
    "Magnus",
    "results_magnus.md",
    (
        _drawing("Figs 1, 3, 4, 5", "the scenario, a transformer, decoding, a batch"),
        PaperFigure("Fig 2", "scatter of input and output lengths", why="points without numbers; Table I sums them up"),
        PaperFigure("Table I", "correlation of input and output lengths", "magnus_lengths"),
        PaperFigure("Fig 6", "three batches by arrival, or two by length", "magnus_case_study"),
        _drawing("Figs 7, 8, 9", "the system, its predictor, wasted memory accesses"),
        PaperFigure("Table II", "RMSE of four length predictors", why="run on real texts in results_forecasts.md"),
        PaperFigure("Figs 10 and 11", "throughput, tokens and response times against VS, VSQ, CCB", "magnus_overall"),
        PaperFigure("Figs 12 and 13", "the parts of Magnus, one by one", "magnus_ablation"),
        PaperFigure("Fig 14", "errors of the estimator of serving times while it learns", "magnus_learning"),
    ),
    ("conditions_magnus",),
)

MULTI_BIN = Paper(
    "Multi-Bin",
    "results_multi_bin.md",
    (
        PaperFigure("Fig 1 (a)", "throughput of a device by batch size", why="the latency model is from data sheets"),
        PaperFigure("Fig 1 (b), sections 4, 5, A.4", "theorems and the example", "multibin_theory"),
        _drawing("Fig 2", "the algorithm"),
        PaperFigure("Fig 3", "throughput by rate and bins, U(1, 20)", "multibin_fig3"),
        PaperFigure("Fig 4", "latency by rate and bins, U(1, 20)", "multibin_fig4"),
        PaperFigure("Fig 5", "seconds by output tokens of a device", why="its 0.0366 s a token are put in"),
        PaperFigure("Fig 6", "thresholds and latency, GSM8K", "multibin_fig6"),
        PaperFigure("Fig 7", "throughput of real inference by bins", "multibin_real"),
        PaperFigure("Fig 8", "throughput where bins are predicted wrongly", "multibin_errors"),
        PaperFigure("Fig 9", "exponential service times", "multibin_exponential"),
        PaperFigure("Fig 10", "confusion matrices of BERT", why="printed as colours; its accuracies are Table 1"),
        PaperFigure("Table 1 and Fig 11", "accuracy and throughput with a predictor", "multibin_predictor"),
    ),
)

FASTSERVE = Paper(
    "FastServe",
    "results_fastserve.md",
    (
        _drawing("Figs 1 to 5, 7, 8", "decoding, the system, the queues, the cache, pipelines"),
        PaperFigure("Fig 6", "three jobs under four schedulers", "fastserve_fig6"),
        PaperFigure("Fig 9 (a)", "mean JCT by rate, 175B on 16 GPUs", "fastserve_load"),
        PaperFigure("Fig 9 (b)", "mean JCT by burstiness", "fastserve_cv"),
        PaperFigure("Fig 9 (c)", "mean JCT by skew of lengths", "fastserve_zipf"),
        PaperFigure("Fig 10 (a)", "MLFQ without skip-join, by rate", "fastserve_variants", r"^\(a\)"),
        PaperFigure("Fig 10 (b)", "the same, by burstiness", "fastserve_variants", r"^\(b\)"),
        PaperFigure("Fig 10 (c)", "the same, by skew", "fastserve_variants", r"^\(c\)"),
        PaperFigure("Fig 10 (d)", "the same, by quantum ratio", "fastserve_variants", r"^\(d\)"),
        PaperFigure("Section 4.2", "memory of a job and peaks", "fastserve_kv", r"^[^(]"),
        PaperFigure("Fig 11 (a)", "Defer and Reactive, by rate", "fastserve_kv", r"^\(a\)"),
        PaperFigure("Fig 11 (b)", "the same, by burstiness", "fastserve_kv", r"^\(b\)"),
        PaperFigure("Fig 11 (c)", "the same, by skew", "fastserve_kv", r"^\(c\)"),
        PaperFigure("Fig 11 (d)", "the same, by memory", "fastserve_kv", r"^\(d\)"),
        PaperFigure("Section 6.4 (Fig 12)", "66B on 6 to 16 GPUs", "fastserve_scaling"),
    ),
    (
        "conditions_fastserve",
        "conditions_fastserve_swapping",
        "conditions_fastserve_peak",
    ),
)

PAST_FUTURE = Paper(
    "Past-Future",
    "results_past_future.md",
    (
        PaperFigure("Fig 1", "memory and evictions of three kinds of scheduler", "past_future_fig1"),
        _drawing("Figs 2, 5, 6", "the scheduler, two admissions of one request, the framework"),
        PaperFigure("Fig 3", "similarity of windows of outputs", "past_future_window", r"^Fig\. 3"),
        PaperFigure("Fig 4", "similarity by size of window", "past_future_window", r"^Fig\. 4"),
        PaperFigure("Fig 7, D1", "goodput by number of clients, 7B", "past_future_goodput", "^D1"),
        PaperFigure("Fig 7, D3", "the same, long prompts", "past_future_goodput", "^D3"),
        PaperFigure("Fig 7, ShareGPT-o1", "the same, fitted lengths", "past_future_goodput", "^ShareGPT"),
        PaperFigure("Fig 7, 13B and 70B", "two more models", why="13B was tried once, in the same order"),
        PaperFigure("Table 1", "steps, memory and evictions of nine settings", "past_future_table1"),
        PaperFigure("Fig 8", "settings under a load that changes", "past_future_varying"),
        PaperFigure(
            "Fig 9",
            "goodput of frameworks, on a processor",
            "past_future_frameworks",
            command="python -m benchmarks.frameworks",
        ),
        PaperFigure("Table 2", "throughput of multimodal models", "past_future_table2"),
    ),
    (
        "conditions_past_future",
        "conditions_past_future_table1",
        "conditions_past_future_table2",
    ),
)

PREBLE = Paper(
    "Preble",
    "results_preble.md",
    (
        PaperFigure("Figs 1 and 2", "prefill and decode times of an A6000", why="the authors' constants are put in"),
        _drawing("Figs 3 and 6", "five kinds of prompts, the system"),
        PaperFigure("Table 1, Fig 4", "lengths and sharing of five workloads", why="the means are put in"),
        PaperFigure("Fig 5", "arrivals and lengths of Azure's trace", why="statistics of a trace, no result"),
        PaperFigure("Fig 7, 2 A6000", "latency of five workloads, Mistral 7B", "preble_workloads", "2 a6000"),
        PaperFigure("Fig 7, 4 A6000", "the same on four", "preble_workloads", "4 a6000"),
        PaperFigure("Fig 7, 8 H100", "the same, Llama-3 70B", "preble_workloads", "8 h100"),
        PaperFigure("Fig 8", "two workloads mixed, at Azure's instants", "preble_mixed"),
        PaperFigure("Fig 9", "vLLM as the engine: whole prompts in a step", "preble_vllm"),
        PaperFigure("Fig 10", "the parts of Preble, one by one", "preble_ablation"),
        PaperFigure("Fig 10, elsewhere", "the later parts where they act", "preble_parts"),
        PaperFigure("Section 5.4", "requests a second of the global scheduler", "preble_scheduler_rate"),
    ),
    (
        "conditions_preble",
        "conditions_preble_parts",
    ),
)

PAPERS = (MAGNUS, MULTI_BIN, FASTSERVE, PAST_FUTURE, PREBLE)


def gaps() -> list[tuple[Paper, PaperFigure]]:
    """Figures and tables with results that nothing runs again."""
    return [(paper, each) for paper in PAPERS for each in paper.figures if each.result and not each.reproduction]


def gap_lines() -> list[str]:
    return [f"{paper.name}, {figure.number}: {figure.why}" for paper, figure in gaps()]
