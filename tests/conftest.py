"""Settings that hold for every test."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when Ray is imported. Left unset, Ray would write a token into the home directory. Servers under test set
# their own.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples in every run, and no deadline: a verdict must not depend on the machine's speed.
settings.register_profile("farsight", derandomize=True, deadline=None, max_examples=50, database=None)
settings.load_profile("farsight")
