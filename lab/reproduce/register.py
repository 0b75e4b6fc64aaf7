"""All reproductions by name, in the order of ``--all``."""

from __future__ import annotations

from lab.reproduce.combined import COMBINED
from lab.reproduce.conditions import FASTSERVE_CONDITIONS, MAGNUS_CONDITIONS, PREBLE_CONDITIONS
from lab.reproduce.deadlines import DEADLINES
from lab.reproduce.fast_serve import FAST_SERVE
from lab.reproduce.magnus import MAGNUS
from lab.reproduce.magnus_systems import MAGNUS_LEARNING
from lab.reproduce.multi_bin import MULTI_BIN
from lab.reproduce.past_future import PAST_FUTURE
from lab.reproduce.past_future_conditions import PAST_FUTURE_CONDITIONS
from lab.reproduce.placements import PLACEMENTS
from lab.reproduce.preble.figures import PREBLE_RESULTS
from lab.reproduce.preble.parts import PREBLE_PARTS
from lab.reproduce.promise import PROMISE
from lab.reproduce.rows import Reproduction
from lab.reproduce.tail import TAIL

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
    MAGNUS_CONDITIONS,
    *FASTSERVE_CONDITIONS,
    *PAST_FUTURE_CONDITIONS,
    *PREBLE_CONDITIONS,
)

REPRODUCTIONS: dict[str, Reproduction] = {each.name: each for each in _ALL}
