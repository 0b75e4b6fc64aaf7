"""Published checkpoints that tests compute with; downloaded once a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from farsight.core.errors import FarsightError
from farsight.engine.checkpoint.catalogue import catalogue, models_dir
from farsight.services.commands.model_sources import fetch


def smollm2() -> Path:
    """Returns SmolLM2-135M-Instruct in 4 bits (Q4_1, 94 MiB, Apache-2.0); skips the test where it cannot be had."""
    try:
        return fetch(catalogue()["smollm2"], models_dir(), print)
    except FarsightError as error:
        pytest.skip(str(error))
