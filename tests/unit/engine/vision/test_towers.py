"""Rows of towers: in other types, on a GPU, in batches, and of checkpoints that are not what they say.

Qwen-VL's, which transformers has not, also number by number against its description.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from farsight.engine.checkpoint.config_fields import CheckpointError, UnsupportedModelError
from farsight.engine.checkpoint.families.vision import QWEN_VL as NAME
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.vision.geometry import load_geometry
from farsight.engine.vision.layers import TowerTensors
from farsight.engine.vision.model import VisionModel, load_vision
from farsight.engine.vision.qwen_vl import QwenVlTower
from tests.unit.engine.vision.models import IMAGE_ID, SHAPES, save_seeing_model
from tests.unit.engine.vision.written import HIDDEN, QUERIES, QWEN_VL, SIDE, WrittenReference, save_written_seeing

WRITTEN = "qwen_vl"


def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = ((40, 50), (28, 28), (9, 60), (33, 31))
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def save(out: Path, shape: str) -> Path:
    return save_written_seeing(out) if shape == WRITTEN else save_seeing_model(out, shape)


def seeing(model_dir: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> VisionModel:
    vision = load_vision(model_dir, dtype, device)
    assert vision is not None
    return vision


def check_close(found: np.ndarray, exact: np.ndarray, share: float) -> None:
    """The errors are a small share of the values."""
    assert np.linalg.norm(found - exact) <= share * np.linalg.norm(exact)


@pytest.mark.parametrize("shape", [*SHAPES, WRITTEN])
def test_batches_and_types_change_little(shape: str, tmp_path: Path) -> None:
    model_dir = save(tmp_path, shape)
    exact, rounded = seeing(model_dir), seeing(model_dir, torch.bfloat16)
    prepared = [exact.geometry.prepare(rgb) for rgb in pictures()]
    together = exact.encode(prepared)
    for image, rows, small in zip(prepared, together, rounded.encode(prepared), strict=True):
        [alone] = exact.encode([image])
        assert rows.dtype == np.float32 and rows.shape == (image.num_tokens, exact.hidden_size)
        check_close(rows, alone, 1e-5)
        check_close(small, rows, 0.06)
        assert len(rounded.packed(small)) == 2 * small.size
        assert len(exact.packed(rows)) == 4 * rows.size


def test_rows_are_those_of_the_description(tmp_path: Path) -> None:
    model_dir = save_written_seeing(tmp_path)
    reference, vision = WrittenReference(model_dir), seeing(model_dir)
    given = [*pictures(), np.full((1, 1, 3), 9, np.uint8)]
    prepared = [vision.geometry.prepare(rgb) for rgb in given]
    for rgb, image, rows in zip(given, prepared, vision.encode(prepared), strict=True):
        np.testing.assert_allclose(image.pixels[0], reference.pixels(rgb), atol=1e-6)
        assert rows.shape == (QUERIES, HIDDEN) and image.num_tokens == QUERIES and image.grid == ()
        check_close(rows, reference.rows(rgb).numpy(), 1e-5)


@pytest.mark.parametrize("feature", ["avx2", "avx512_bf16"])
def test_a_processor_that_cannot_compute_with_16_bits_rounds_the_rows_alone(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True})
    model_dir = save_seeing_model(tmp_path, "qwen2_vl")
    exact, rounded = seeing(model_dir), seeing(model_dir, torch.bfloat16)
    [image] = [exact.geometry.prepare(rgb) for rgb in pictures()[:1]]
    [rows], [small] = exact.encode([image]), rounded.encode([image])
    once = torch.from_numpy(rows).bfloat16().float().numpy()
    assert np.array_equal(small, once) == (feature == "avx2")
    assert len(rounded.packed(small)) == 2 * small.size


@pytest.mark.parametrize("change", ["missing", "odd", "more"])
@pytest.mark.parametrize(("shape", "end"), [("qwen2_5_vl", "blocks.1.attn.proj.weight"), (WRITTEN, "attn_pool.query")])
def test_another_checkpoint_is_refused_by_its_tensor(shape: str, end: str, change: str, tmp_path: Path) -> None:
    path = save(tmp_path, shape) / "model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith(end))
    tensor = tensors.pop(name)
    if change == "more":
        tensors |= {name: tensor, name + "s": tensor.clone()}
    elif change == "odd":
        tensors[name] = tensor[:-1].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(end)):
        load_vision(tmp_path, torch.float32)


def test_a_square_as_large_as_the_stored_one_needs_nothing_between() -> None:
    """16 patches a side are the stored positions themselves, and a tower as wide as its rows brings nothing over."""
    visual = QWEN_VL["visual"] | {"width": HIDDEN, "image_size": 64, "n_queries": 256, "layers": 1}
    rng = torch.Generator().manual_seed(1)
    tower = QwenVlTower({**QWEN_VL, "visual": visual}, _Made(rng))
    assert tower._places.shape == (256, HIDDEN) and tower._key_places.shape == (256, HIDDEN)
    assert tower._bring is None


class _Made(TowerTensors):
    """Any tensor that is asked for."""

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__({})
        self._rng = rng

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._rng)


def test_the_name_of_its_text_model_and_a_tower_beside_make_it(tmp_path: Path) -> None:
    save_written_seeing(tmp_path)
    config, geometry = load_model_config(tmp_path), load_geometry(tmp_path)
    assert geometry is not None and config.sees == geometry.family == NAME
    assert (geometry.placeholder, geometry.placeholder_id) == ("<imgpad>", IMAGE_ID)
    assert (geometry.before, geometry.after, geometry.has_grid) == ("<img>", "</img>", False)
    assert geometry.tokens_of(500, 3) == geometry.max_tokens == QUERIES and geometry.max_pixels == 4 * SIDE * SIDE
    text = {name: value for name, value in QWEN_VL.items() if name != "visual"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert load_geometry(tmp_path) is None and load_model_config(tmp_path).sees == ""


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("visual", [], "visual: got .*an object"),
        ("visual.image_size", 30, r"visual\.patch_size: .*a divisor of image_size"),
        ("visual.image_size", None, r"visual\.image_size: .*an integer >= 1"),
        ("visual.n_queries", 8, r"visual\.n_queries: .*the square of a number"),
        ("visual.output_dim", 256, r"visual\.output_dim: .*the hidden_size of the text model \(128\)"),
        ("visual.heads", 5, r"visual\.width: .*a multiple of the 5 heads"),
        ("visual.mlp_ratio", 0, r"visual\.mlp_ratio: .*a number > 0"),
        ("visual.image_start_id", -3, r"visual\.image_start_id: .*a token id"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_field(tmp_path: Path, field: str, value: Any, message: str) -> None:
    save_written_seeing(tmp_path)
    holder, _, name = field.rpartition(".")
    changed = {**QWEN_VL, holder: {**QWEN_VL[holder], name: value}} if holder else {**QWEN_VL, name: value}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(UnsupportedModelError, match=message):
        load_vision(tmp_path, torch.float32)


def test_a_processors_file_is_refused(tmp_path: Path) -> None:
    save_written_seeing(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"do_resize": false}')
    with pytest.raises(UnsupportedModelError, match=r"preprocessor_config\.json: do_resize: .*no such file"):
        load_geometry(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_computes_the_same_rows(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model_dir = save_seeing_model(tmp_path, shape)
    host, device = seeing(model_dir, dtype), seeing(model_dir, dtype, "cuda")
    prepared = [host.geometry.prepare(rgb) for rgb in pictures()]
    for ours, theirs in zip(host.encode(prepared), device.encode(prepared), strict=True):
        check_close(theirs, ours, 1e-3 if dtype == torch.float32 else 0.06)
