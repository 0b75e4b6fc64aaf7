"""Generated regions of Markdown pages: what stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from lab.papers.tables import conditions_tables, figure_section, gaps_table, index_table, printed_table, shares_table
from lab.reproduce.papers import PAPERS, Paper
from tools.reference.cli import cli_reference
from tools.reference.configuration import configuration_reference
from tools.reference.families import families_table
from tools.reference.presets import parts_table, presets_table
from tools.reference.site import vllm_flags_table

DOCS = Path(__file__).parents[2] / "docs"


def _of_paper(paper: Paper) -> Mapping[str, Callable[[], str]]:
    sections = {each.key: partial(figure_section, paper, each) for each in paper.figures if each.reproduction}
    changed = {"conditions": partial(conditions_tables, paper)} if paper.conditions else {}
    return {"index": partial(index_table, paper)} | sections | changed


REGIONS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "reference/configuration.md": {"configuration": configuration_reference},
    "reference/cli.md": {"commands": cli_reference},
    "migration.md": {"vllm": vllm_flags_table},
    "architectures.md": {"families": families_table},
    "policies/README.md": {"presets": presets_table, "parts": parts_table},
    "results.md": {"shares": shares_table, "gaps": gaps_table, "printed": printed_table},
    **{paper.page: _of_paper(paper) for paper in PAPERS},
}
"""Page under ``docs`` -> name of a region -> what stands in it."""


def with_regions(page: str, text: str) -> str:
    """The page's text with its regions generated again.

    Raises:
        ValueError: The page lacks a region.
    """
    for name, make in REGIONS[page].items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page} has no region {name!r}")
        body = make()

        def filled(found: re.Match[str], body: str = body) -> str:
            return f"{found[1]}{body}\n{found[2]}"

        text = pattern.sub(filled, text)
    return text
