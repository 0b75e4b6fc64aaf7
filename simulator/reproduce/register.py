"""All reproductions by name, in the order of ``--all``."""

from __future__ import annotations

from simulator.reproduce.combined import COMBINED
from simulator.reproduce.fast_serve import FAST_SERVE
from simulator.reproduce.magnus import MAGNUS
from simulator.reproduce.magnus_learning import MAGNUS_LEARNING
from simulator.reproduce.multi_bin import MULTI_BIN
from simulator.reproduce.past_future import PAST_FUTURE
from simulator.reproduce.placements import PLACEMENTS
from simulator.reproduce.preble.figures import PREBLE_RESULTS
from simulator.reproduce.preble.parts import PREBLE_PARTS
from simulator.reproduce.rows import Reproduction
from simulator.reproduce.tail.cells import TAIL
from simulator.reproduce.tail.deadlines import DEADLINES
from simulator.reproduce.tail.promise import PROMISE

_ALL: tuple[Reproduction, ...] = (
    *MAGNUS,
    *MAGNUS_LEARNING,
    *MULTI_BIN,
    *FAST_SERVE,
    *PAST_FUTURE,
    *PREBLE_RESULTS,
    *PREBLE_PARTS,
    *PLACEMENTS,
    *COMBINED,
    *TAIL,
    *PROMISE,
    *DEADLINES,
)

REPRODUCTIONS: dict[str, Reproduction] = {each.name: each for each in _ALL}
