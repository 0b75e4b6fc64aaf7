"""Why a printed figure is missed: one sentence for each, and the run that shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of some missed figures.

    Attributes:
        reproduction: Its name in the register.
        settings, metrics: Regular expressions that find the rows.
        why: One sentence, without its full stop.
        shown_by: Name in the register of the run that shows it.
    """

    reproduction: str
    settings: str
    metrics: str
    why: str
    shown_by: str

    @property
    def run(self) -> str:
        """The command."""
        return f"python -m lab.reproduce {self.shown_by}"

    def explains(self, reproduction: str, setting: str, metric: str) -> bool:
        """Whether this row's miss has this cause."""
        return (
            self.reproduction == reproduction
            and re.search(self.settings, setting) is not None
            and re.search(self.metrics, metric) is not None
        )


CAUSES = (
    Cause(
        "magnus_lengths",
        "CC",
        "",
        "reference comments are by many people and do not grow with the code, those of one model do",
        "magnus_lengths",
    ),
    Cause(
        "magnus_case_study",
        "roofline",
        "",
        "the paper's engine reaches half the speed of the data sheet: with its speed fitted both totals come out",
        "magnus_case_study",
    ),
    Cause(
        "magnus_overall",
        "against CCB,",
        "",
        "a CCB that joins at any step is ahead at each load, with 4 places, padding or longer outputs; Magnus serves "
        "1.5 times its requests once its 7 join only together, 1.4 times with 0.5 s at a join",
        "conditions_magnus",
    ),
    Cause(
        "magnus_ablation",
        "GLP against VS, least",
        "valid",
        "the gain rises with the load from 24 to 32 %, and the loads of the paper are not printed",
        "magnus_ablation",
    ),
    Cause(
        "magnus_ablation",
        "ABP against GLP|Magnus against ABP",
        "mean_s|tail_s",
        "the slower system is swamped, so its waits grow for as long as requests come, which the paper does not say",
        "magnus_ablation",
    ),
    Cause(
        "multibin_theory",
        "",
        "most throughput",
        "the paper's own equation (5) gives 128 / 10.5 = 12.19 and not 12.3",
        "multibin_theory",
    ),
    Cause(
        "multibin_predictor",
        "4 bins, predictor",
        "gain",
        "its confusions are not printed: drawn evenly they leave more of the gain than drawn where they hurt",
        "multibin_predictor",
    ),
    Cause(
        "fastserve_variants",
        r"^\([bd]\)",
        "",
        "work that is cut off and done again decides: the factor is 25 at the rate chosen here, 11 at twice it and 8 "
        "at CV 12, and the rate of this panel is not printed",
        "conditions_fastserve",
    ),
    Cause(
        "fastserve_kv",
        "peak KV",
        "",
        "the rate of the run is not the paper's: at 256 requests a second the ratio is 7.2",
        "conditions_fastserve_peak",
    ),
    Cause(
        "fastserve_kv",
        "defer|reactive",
        "",
        "copies run beside the steps here and hardly delay a job, whatever share of the memory is there",
        "fastserve_kv",
    ),
    Cause(
        "past_future_goodput",
        "",
        "Conservative",
        "most first tokens of Conservative, which runs fewest at a time, come after the 10 s that make a request good",
        "past_future_goodput",
    ),
    Cause(
        "past_future_goodput",
        "",
        "Aggressive|by gaps",
        "clients that queue get late first tokens under any admission: with that bound lifted 0.53 becomes 1.09 at 130 "
        "clients, and 2.8 at 170 over a watermark of 99 %",
        "conditions_past_future",
    ),
    Cause(
        "past_future_table1",
        "Aggressive",
        "future",
        "ours is a mean over admissions; over all steps, another reading of the text, it is 3 points more and agrees",
        "conditions_past_future_table1",
    ),
    Cause(
        "past_future_table1",
        "Past-Future",
        "future",
        "not found: under Past-Future a mean over all steps is only 0.3 points more than ours over admissions",
        "conditions_past_future_table1",
    ),
    Cause(
        "past_future_table1",
        "D2, Conservative",
        "current|future|evictions",
        "these two lines count outputs of 4,096 tokens, less than the other lines of D2 need",
        "conditions_past_future_table1",
    ),
    Cause(
        "past_future_table1",
        "",
        "evictions",
        "not found: which request is evicted and when it may join again is not said, and evictions hang on both",
        "past_future_table1",
    ),
    Cause(
        "past_future_table2",
        "",
        "",
        "tokens a second grow with the length of answers, which is not printed, and no one length fits two models",
        "conditions_past_future_table2",
    ),
    Cause(
        "preble_mixed",
        "",
        "p99|ttft",
        "round-robin's backlog grows with the length of the run, which is not printed: with 1,000 requests, not 4,000, "
        "both factors are within 25 %",
        "conditions_preble",
    ),
    Cause(
        "preble_mixed",
        "",
        "tpot",
        "not found: at loads of 0.8 and 1 it is 1.7 and 1.5, whatever the length of the run",
        "conditions_preble",
    ),
    Cause(
        "preble_workloads",
        "program",
        "",
        "three quarters of a program's prompt are one system prompt, which every replica holds under round-robin too",
        "preble_workloads",
    ),
    Cause(
        "preble_workloads",
        "agent.*a6000",
        "mean",
        "round-robin is beyond its capacity at this load and falls behind for as long as the run lasts",
        "preble_workloads",
    ),
    Cause(
        "preble_workloads",
        "8 h100",
        "p99",
        "two replicas of 700,000 tokens hold all prefixes under round-robin too",
        "preble_workloads",
    ),
)


def cause_of(reproduction: str, setting: str, metric: str) -> Cause | None:
    """Returns the first cause that explains a missed row; None where none is known."""
    return next((cause for cause in CAUSES if cause.explains(reproduction, setting, metric)), None)
