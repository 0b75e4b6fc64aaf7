"""Small tensors are read and rounded by one thread: those of a mixture are thousands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.checkpoint import sources
from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.threads import SMALL, threads_for
from engine.checkpoint.weights import Linear, load_weights
from engine.models import quantize
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.small_models import save_model


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_a_large_tensor_has_all_threads_and_a_small_one_a_single_one() -> None:
    for num_values, expected in ((SMALL, 1), (SMALL + 1, 3)):
        with threads_for(num_values):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3
    with pytest.raises(RuntimeError), threads_for(1):
        raise RuntimeError
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_experts_are_read_and_rounded_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = save_model(tmp_path, **FAMILIES["qwen3 moe"])
    seen: list[int] = []
    fill, nibbles = sources._SafetensorsSource.fill, quantize._nibbles

    def watched_fill(self: sources._SafetensorsSource, name: str, target: Tensor) -> None:
        seen.append(torch.get_num_threads())
        fill(self, name, target)

    def watched_nibbles(groups: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(torch.get_num_threads())
        return nibbles(groups)

    monkeypatch.setattr(sources._SafetensorsSource, "fill", watched_fill)
    monkeypatch.setattr(quantize, "_nibbles", watched_nibbles)
    load_weights(model_dir, load_model_config(model_dir), torch.float32)
    assert len(seen) > 30
    quantize.quantize_linear(Linear(torch.randn(64, 32), None), 4)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3
