"""All reproductions by name, in the order of ``--all``."""

from __future__ import annotations

from simulator.reproduce.fast_serve import FAST_SERVE
from simulator.reproduce.rows import Reproduction

_ALL: tuple[Reproduction, ...] = (*FAST_SERVE,)

REPRODUCTIONS: dict[str, Reproduction] = {each.name: each for each in _ALL}
