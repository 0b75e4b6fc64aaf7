"""Every family that is read from GGUF files: the logits of small random models beside transformers' and llama.cpp's.

The files are written as llama.cpp's converter writes them, with the names that the ``gguf`` package has for tensors.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.families.gguf import GGUF_FAMILIES
from farsight.engine.checkpoint.gguf_model import gguf_config
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.names import num_parameters
from farsight.engine.steps.model_runner import ModelRunner
from farsight.tokenization.gguf_file import read_gguf
from tests.unit.engine.driver import Driver
from tests.unit.engine.families.shapes import FAMILIES, FULL, SLIDING
from tests.unit.engine.gguf_files import ARCHITECTURES, write_gguf
from tests.unit.engine.small_models import load_reference, save_model

PROMPT = list(range(20, 60))
"""Longer than any of the windows."""

PERIODS: dict[str, dict[str, Any]] = {
    name: {"num_hidden_layers": period, "layer_types": [SLIDING] * (period - 1) + [FULL]}
    for name, period in (("gemma2", 2), ("gemma3", 6), ("cohere2", 4))
}
"""As in published models: a file says nothing of it."""

OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "use_sliding_window": False},
    "glm4": {"attention_bias": True},
    "cohere2": {"logit_scale": 0.5},
    "gpt-oss": {"swiglu_limit": 7.0},
    "ministral3": {
        "rope_parameters": FAMILIES["ministral3"]["rope_parameters"] | {"mscale": 1.0, "mscale_all_dim": 1.0}
    },
    "glm4 moe": {"n_group": 1, "topk_group": 1},
    "lfm2": {"conv_bias": False},
    "lfm2 moe": {"routed_scaling_factor": 1.0},
}
WRITTEN = {
    name: FAMILIES[name] | PERIODS.get(name, {}) | OWN.get(name, {})
    for name in (
        *("llama yarn", "mistral", "mixtral", "qwen2 moe", "gemma", "gemma2", "gemma3", "granite", "granite moe"),
        *("olmo2", "olmo3", "olmoe", "smollm3", "glm4", "glm4 moe", "cohere", "cohere2", "gpt-oss"),
        *("gemma4", "gemma4 e", "ministral3", "ernie 4.5", "lfm2", "lfm2 moe", "qwen3.5", "qwen3.5 moe"),
    )
}


def our_logits(path: Path, backend: str) -> torch.Tensor:
    """Behind the prompt, of which two chunks are computed: ``[vocab]``."""
    sizes: dict[str, Any] = {"num_blocks": 8, "block_size": 16, "context_len": 64}
    driver = Driver(ModelRunner.from_dir(path, dtype=torch.float32, backend=backend, **sizes))
    driver.add("a", PROMPT)
    driver.logits(a=25)
    (found,) = driver.logits(a=driver.remaining("a"))
    assert found is not None
    return found


@pytest.mark.parametrize("family", WRITTEN)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    directory = save_model(tmp_path / "directory", **WRITTEN[family])
    path = write_gguf(tmp_path / "model.gguf", directory)
    theirs, ours = load_model_config(directory), load_model_config(path)
    assert (ours.architecture, num_parameters(ours)) == (theirs.architecture, num_parameters(theirs))
    model: Any = load_reference(directory)  # transformers has no types for what a model mixes in
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    for backend in ("native", "torch"):
        assert (our_logits(path, backend) - expected).abs().max() < 1e-3, backend
    assert expected.std() > 1, "logits differ"


OTHERWISE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},  # llama.cpp has windows for other architectures
    "mixtral": {"sliding_window": None},
    "olmoe": {"num_key_value_heads": 4},
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},  # it rounds the ends of yarn's ramp
}
"""What is changed for llama.cpp, where it computes something else or nothing."""


@pytest.mark.nightly
@pytest.mark.parametrize("family", WRITTEN)
def test_logits_are_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    """Both read one file and compute in float32; llama.cpp's GELU is a table of float16."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is no dependency")
    directory = save_model(tmp_path / "directory", **WRITTEN[family] | OTHERWISE.get(family, {}))
    path = write_gguf(tmp_path / "model.gguf", directory)
    float32 = llama_cpp.GGML_TYPE_F32
    llama = llama_cpp.Llama(
        str(path), n_ctx=64, n_threads=1, verbose=False, logits_all=True, type_k=float32, type_v=float32
    )
    llama.eval(PROMPT)
    expected = torch.tensor(llama.scores[len(PROMPT) - 1])
    assert (our_logits(path, "native") - expected).abs().max() < (0.05 if family.startswith("gemma") else 2e-3)


@pytest.mark.parametrize("name", ["mistral3"])
def test_further_names_of_an_architecture(name: str, tmp_path: Path) -> None:
    """The same tensors and keys."""
    directory = save_model(tmp_path / "directory", **FAMILIES["mistral"])
    known, other = (
        write_gguf(tmp_path / f"{each}.gguf", directory, architecture=each)
        for each in (ARCHITECTURES["MistralForCausalLM"], name)
    )
    assert load_model_config(known) == load_model_config(other)


def test_windows_by_layer(tmp_path: Path) -> None:
    """A file says which layers slide, or after how many one does not; without a window none does."""
    directory = save_model(
        tmp_path / "directory", **WRITTEN["gemma2"] | {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]}
    )
    file = read_gguf(write_gguf(tmp_path / "model.gguf", directory))

    def types(**changes: Any) -> list[str]:
        metadata = {**file.metadata, **{f"gemma2.attention.{key}": value for key, value in changes.items()}}
        found: list[str] = gguf_config(dataclasses.replace(file, metadata=metadata))["layer_types"]
        return found

    assert types() == [SLIDING, FULL, SLIDING]
    assert types(sliding_window_pattern=3) == [SLIDING, SLIDING, FULL]
    assert types(sliding_window_pattern=np.array([False, True, True])) == [FULL, SLIDING, SLIDING]
    assert types(sliding_window=0) == [FULL] * 3
    with pytest.raises(InvalidValueError, match="array of 3"):
        types(sliding_window_pattern=np.array([True]))


@pytest.mark.parametrize(("layers", "expected"), [(46, 144), (42, 128)])
def test_the_one_gemma_2_whose_attention_is_scaled_by_its_width(layers: int, expected: int, tmp_path: Path) -> None:
    """Gemma 2 27B: 4608 values, 32 heads of 128."""
    file = read_gguf(write_gguf(tmp_path / "model.gguf", save_model(tmp_path / "directory", **WRITTEN["gemma2"])))
    sizes = {"embedding_length": 4608, "attention.head_count": 32, "attention.key_length": 128, "block_count": layers}
    sizes |= {"attention.value_length": 128, "rope.dimension_count": 128}
    metadata = {**file.metadata, **{f"gemma2.{key}": value for key, value in sizes.items()}}
    assert gguf_config(dataclasses.replace(file, metadata=metadata))["query_pre_attn_scalar"] == expected


REFUSED = [
    ("granite", "rope.scaling.finetuned", False),
    ("granite moe", "expert_shared_feed_forward_length", 32),
    ("llama yarn", "rope.scaling.yarn_ext_factor", 0.5),
    ("granite", "attention.scale", 0.0),
]


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_what_would_change_the_computation_is_refused(family: str, key: str, value: object, tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "model.gguf", save_model(tmp_path / "directory", **WRITTEN[family])))
    name = file.metadata["general.architecture"]
    with pytest.raises(InvalidValueError, match=key):
        gguf_config(dataclasses.replace(file, metadata={**file.metadata, f"{name}.{key}": value}))


def test_every_architecture_is_written_here() -> None:
    written = {ARCHITECTURES[shape["architecture"]] for shape in WRITTEN.values()}
    elsewhere = {"llama", "qwen2", "qwen3", "qwen3moe", "phi3"}  # test_gguf.py
    assert written | elsewhere | {"mistral3"} == set(GGUF_FAMILIES)
