"""Who gets the slots of a batch, by prefix hits."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
from matplotlib.figure import Figure

from policies.interfaces import Job
from policies.order.hit_groups import HitGroups, quotas

SLOTS = 55
WAITING = (20, 3, 9, 2, 8, 12, 4, 15, 6, 30)


def draw() -> Figure:
    """The queue before, and the batch that is taken from it."""
    order = HitGroups(SLOTS)
    for group, num in enumerate(WAITING):
        for i in range(num):
            order.add(Job(f"{group}-{i}", float(i), 100, 10, cached_len=10 * group + 5), 0.0)
    taken = Counter(order.group(job) for job in islice(order.ranked(0.0), SLOTS))
    groups = np.arange(len(WAITING))
    figure = Figure(figsize=(6.8, 3.3))
    axes = figure.subplots()
    axes.bar(groups, WAITING, color="#dddddd", width=0.75, label="waiting")
    axes.bar(groups, [taken[int(group)] for group in groups], color="#4c78a8", width=0.75, label="in the batch")
    shares = quotas(len(WAITING), SLOTS)
    axes.hlines(shares, groups - 0.42, groups + 0.42, color="#e45756", label="the group's share")
    axes.set_xticks(groups, [f"{10 * g}-{10 * g + 10}" for g in groups], fontsize=8)
    axes.set(xlabel="prompt tokens cached, %", ylabel="jobs", title="")
    axes.set_title(f"{SLOTS} free slots: 10 for the highest group, 9 for the next, ... 1", loc="left", fontsize=9)
    axes.legend(frameon=False, loc="upper center")
    figure.tight_layout()
    return figure
