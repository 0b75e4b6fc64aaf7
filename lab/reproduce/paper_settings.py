"""What the reproductions change of a server's settings, by name."""

from __future__ import annotations

from core.config.scheduling import SchedulerConfig
from policies.settings import MlfqRules

UNBOUND = SchedulerConfig(max_gap_ms=0.0)
"""No paper bounds the gap that prompts make between two tokens of a stream."""

ARTIFACT = SchedulerConfig(max_gap_ms=0.0, quantum_s=0.01, starve_limit_s=3.0)
"""The numbers of FastServe's artifact."""

FIXED_QUANTUM = MlfqRules(follows_cost=False)
"""The artifact's quantum is what was measured before the run."""
