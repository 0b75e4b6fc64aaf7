"""Draws each picture of ``docs/policies`` by its function in the modules beside this one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from lab.pictures import batches, memory, orders, prefixes

TARGET = Path(__file__).parents[2] / "docs" / "policies"

STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "farsight",
    "savefig.bbox": "tight",
}

PICTURES: Mapping[str, Callable[[], Figure]] = {
    "boosted": orders.draw_boosted,
    "e2_router": prefixes.draw_e2_router,
    "enst_offload": memory.draw_enst_offload,
    "gittins": orders.draw_gittins,
    "hit_groups": orders.draw_hit_groups,
    "hrrn": orders.draw_hrrn,
    "multi_bin": batches.draw_multi_bin,
    "past_future": memory.draw_past_future,
    "radix_tree": prefixes.draw_radix_tree,
    "skip_join_mlfq": orders.draw_skip_join_mlfq,
    "wma_batcher": batches.draw_wma_batcher,
}
"""By the name of the file in ``docs/policies``."""


def main() -> None:
    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    for name in sys.argv[1:] or PICTURES:
        figure = PICTURES[name]()
        path = TARGET / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
