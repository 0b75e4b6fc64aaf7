"""Draws the papers' pictures: ``python -m lab.papers [ROWS.jsonl ...]``.

Rows that are named are kept first: each file is what ``python -m lab.reproduce NAME --json`` printed.
Afterwards ``python -m tools.reference`` writes the tables.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from lab.papers.pictures import draw
from lab.papers.tables import CONDITIONS, ROWS, rows_of
from lab.reproduce.papers import PAPERS

for name in sys.argv[1:]:
    file = Path(name).name
    shutil.copyfile(name, (CONDITIONS if file.startswith("conditions_") else ROWS) / file)
for paper in PAPERS:
    for figure in paper.figures:
        if rows_of(figure):
            draw(paper, figure)
            print(f"drew {paper.name}, {figure.number}")
