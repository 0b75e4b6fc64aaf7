"""Runs the modules beside this one: each has ``draw() -> Figure`` and gives ``docs/policies/<module>.svg``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

import lab.pictures

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


def main() -> None:
    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    every = [each.name for each in pkgutil.iter_modules(lab.pictures.__path__) if each.name != "__main__"]
    for name in sys.argv[1:] or every:
        figure = importlib.import_module(f"lab.pictures.{name}").draw()
        path = TARGET / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
