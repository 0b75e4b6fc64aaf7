"""Pipeline stages that only take time and compute nothing: ``python -m benchmarks.parallel.emulated`` is such a rank.

On a machine whose processors others use as well, two stages that really compute show how busy it is, not what the
pipeline is worth.
"""

from __future__ import annotations

import time

from torch import Tensor

from farsight.engine.attention.attention import StepAttention, StepLayout
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.layers import DecoderLayers
from farsight.engine.parallel.__main__ import main

BASE_S = 0.03
ROW_S = 0.003
"""A stage takes ``BASE_S + rows * ROW_S`` seconds; the base stands for its weights. Both are so long that the work of
rank 0 between steps matters little, on a busy machine as well."""


def stage_s(rows: int) -> float:
    return BASE_S + rows * ROW_S


def emulate_stages() -> None:
    """Replaces the layers of this process from now on."""

    def run(
        layers: DecoderLayers, hidden: Tensor, layout: StepLayout, pool: KVPool, attention: StepAttention
    ) -> Tensor:
        time.sleep(stage_s(len(hidden)))
        return hidden

    DecoderLayers.run = run  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    emulate_stages()
    main()
