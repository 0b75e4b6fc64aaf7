"""A rank whose device has no memory for some steps, here or there in the middle; ``python -m`` runs such a rank."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from farsight.engine.attention.layout import layout_of
from farsight.engine.models.layers import DecoderLayers
from farsight.engine.models.model import output_logits
from farsight.engine.parallel import stage
from farsight.engine.parallel.__main__ import main
from farsight.engine.parallel.exchange import Exchange

POINTS = ("layout", "heads", "mlp", "logits")
"""Before the first sum, between two of a layer, and behind the last one."""

Patch = Callable[[Any, str, Any], None]


class Shortage:
    """Takes the memory away from steps of more than one token, in this process.

    Args:
        share: The share of the steps that fail.
        patch: ``setattr``, or one that takes it back.
    """

    def __init__(self, seed: int, share: float, patch: Patch = setattr) -> None:
        self.share = share
        self.least = 2
        self.error: type[Exception] = torch.OutOfMemoryError
        self.num_failed = 0
        self._rng = random.Random(seed)
        self._point = ""
        finish, receive = stage.Stage.finish, Exchange.receive

        def finishing(each: stage.Stage) -> stage.StepOutcome:
            self._point = self._rng.choice(POINTS) if self._fails(each._begun[0].order.rows.shape[1]) else ""
            return finish(each)

        def receiving(exchange: Exchange, num_rows: int, *, blank: bool) -> Any:
            if not blank and self._fails(num_rows):
                self._raise("receive")
            return receive(exchange, num_rows, blank=blank)

        patch(stage.Stage, "finish", finishing)
        patch(Exchange, "receive", receiving)
        patch(stage, "layout_of", self._failing("layout", layout_of))
        patch(stage, "output_logits", self._failing("logits", output_logits))
        patch(DecoderLayers, "_heads", self._in_last_layer("heads", DecoderLayers._heads))
        patch(DecoderLayers, "_mlp", self._in_last_layer("mlp", DecoderLayers._mlp))

    def _fails(self, num_rows: int) -> bool:
        return num_rows >= self.least and self._rng.random() < self.share

    def _raise(self, point: str) -> None:
        self.num_failed += 1
        raise self.error(f"no room at {point}")

    def _failing(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if self._point == point:
                self._raise(point)
            return function(*args)

        return run

    def _in_last_layer(self, point: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(layers: DecoderLayers, layer: Any, *args: Any) -> Any:
            if self._point == point and layer is layers._layers[-1]:
                self._raise(point)
            return method(layers, layer, *args)

        return run


if __name__ == "__main__":
    Shortage(seed=int(sys.argv[3]), share=0.2)
    main()
