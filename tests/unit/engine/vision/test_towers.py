"""Rows of towers: in other types, on a GPU, in batches, and of checkpoints that are not what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.config_fields import CheckpointError
from engine.vision.model import VisionModel, load_vision
from tests.unit.engine.vision.models import SHAPES, save_seeing_model


def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((40, 50), (28, 28), (9, 60), (33, 31))]


def seeing(model_dir: Path, dtype: torch.dtype, device: str = "cpu") -> VisionModel:
    vision = load_vision(model_dir, dtype, device)
    assert vision is not None
    return vision


def check_close(found: np.ndarray, exact: np.ndarray, share: float) -> None:
    """The errors are a small share of the values."""
    assert np.linalg.norm(found - exact) <= share * np.linalg.norm(exact)


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_and_types_change_little(shape: str, tmp_path: Path) -> None:
    model_dir = save_seeing_model(tmp_path, shape)
    exact, rounded = seeing(model_dir, torch.float32), seeing(model_dir, torch.bfloat16)
    prepared = [exact.prepare(rgb) for rgb in pictures()]
    together = exact.encode(prepared)
    for image, rows, small in zip(prepared, together, rounded.encode(prepared), strict=True):
        [alone] = exact.encode([image])
        assert rows.dtype == np.float32 and rows.shape == (image.num_tokens, exact.hidden_size)
        check_close(rows, alone, 1e-5)
        check_close(small, rows, 0.06)
        assert len(rounded.packed(small)) == 2 * small.size
        assert len(exact.packed(rows)) == 4 * rows.size


@pytest.mark.parametrize("feature", ["avx2", "avx512_bf16"])
def test_a_processor_that_cannot_compute_with_16_bits_rounds_the_rows_alone(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True})
    model_dir = save_seeing_model(tmp_path, "qwen2_vl")
    exact, rounded = seeing(model_dir, torch.float32), seeing(model_dir, torch.bfloat16)
    [image] = [exact.prepare(rgb) for rgb in pictures()[:1]]
    [rows], [small] = exact.encode([image]), rounded.encode([image])
    once = torch.from_numpy(rows).bfloat16().float().numpy()
    assert np.array_equal(small, once) == (feature == "avx2")
    assert len(rounded.packed(small)) == 2 * small.size


@pytest.mark.parametrize("change", ["missing", "odd", "more"])
def test_another_checkpoint_is_refused_by_its_tensor(change: str, tmp_path: Path) -> None:
    save_seeing_model(tmp_path, "qwen2_5_vl")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("blocks.1.attn.proj.weight"))
    if change == "missing":
        del tensors[name]
    elif change == "odd":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors[name.replace("proj", "gate")] = tensors[name].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attn\.(proj|gate)\.weight"):
        load_vision(tmp_path, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_computes_the_same_rows(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model_dir = save_seeing_model(tmp_path, shape)
    host, device = seeing(model_dir, dtype), seeing(model_dir, dtype, "cuda")
    prepared = [host.prepare(rgb) for rgb in pictures()]
    for ours, theirs in zip(host.encode(prepared), device.encode(prepared), strict=True):
        check_close(theirs, ours, 1e-3 if dtype == torch.float32 else 0.06)
