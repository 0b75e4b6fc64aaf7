"""GGUF files: the same model as a directory and as a file gives the same weights, configuration and tokens."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from farsight.core.errors import InvalidValueError
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from farsight.engine.checkpoint import sources
from farsight.engine.checkpoint.check import check_checkpoint
from farsight.engine.checkpoint.config_fields import CheckpointError
from farsight.engine.checkpoint.model_config import config_of, load_model_config, resolve_model_dir
from farsight.engine.checkpoint.names import num_parameters
from farsight.engine.checkpoint.quantized import JoinedLinear, QuantizedLinear
from farsight.engine.checkpoint.repacking import gguf_record, has_record
from farsight.engine.checkpoint.rotary_config import FactorScaling
from farsight.engine.checkpoint.sources import open_checkpoint
from farsight.engine.checkpoint.weights import Linear, load_weights
from farsight.engine.models.rotary import frequencies, rotary_tables
from farsight.engine.native.model import NativeBackend
from farsight.engine.steps.model_runner import ModelRunner
from farsight.tokenization.gguf_file import read_gguf
from tests.unit.engine.checkpoint.test_weights import flat
from tests.unit.engine.driver import PROMPTS, SMALL, greedy_answers
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.gguf_files import SCALES_AT, dequantized, random_rows, write_gguf
from tests.unit.engine.small_models import SHAPES, assert_greedy, load_reference, save_model

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
"""Rows that hold whole blocks of every type."""


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("wide"), **WIDE)


def loaded(path: Path) -> list[torch.Tensor]:
    return flat(load_weights(path, load_model_config(path), torch.float32, keep_quantized=False))


@pytest.mark.parametrize("kind", [kind for kind in SCALES_AT if has_record(kind)])
def test_records_are_what_the_package_dequantizes(kind):
    rows = random_rows(kind, 24, 512, seed=3)
    record = gguf_record(kind, torch.from_numpy(rows))
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(record.dense(torch.float32).numpy(), expected)
    assert len(record.integers().unique()) > 8, "the integers differ"


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *SCALES_AT])
def test_weights_are_what_the_package_dequantizes(kind, wide_dir, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", wide_dir, kind)
    expected = loaded(dequantized(path, wide_dir, tmp_path / "plain"))
    found = loaded(path)
    assert len(found) == len(expected) == 15
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert kind != "F32" or all(torch.equal(a, b) for a, b in zip(found, loaded(wide_dir), strict=True))


MIXTURE = FAMILIES["qwen3 moe"] | {"hidden_size": 64, "moe_intermediate_size": 64, "mlp_only_layers": []}


@pytest.mark.parametrize(
    "shape", ["mha", "gqa", "mqa", "tied", "wide_heads", "linear", "mistral", "qwen2", "phi3", "qwen3", "mixture"]
)
def test_a_file_is_the_model_of_its_directory(shape, model_dir: Callable[[str], Path], tmp_path):
    own = {"qwen3": FAMILIES["qwen3"], "mixture": MIXTURE}
    directory = save_model(tmp_path / "directory", **own[shape]) if shape in own else model_dir(shape)
    path = write_gguf(tmp_path / "model.gguf", directory)
    theirs, ours = load_model_config(directory), load_model_config(path)
    assert dataclasses.replace(ours, norm_eps=theirs.norm_eps, rotary=theirs.rotary, names=theirs.names) == theirs
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)
    assert ours.rotary is not None and theirs.rotary is not None
    assert torch.allclose(frequencies(ours.rotary, 64), frequencies(theirs.rotary, 64))
    assert all(torch.equal(a, b) for a, b in zip(loaded(path), loaded(directory), strict=True))
    assert greedy_answers(path) == greedy_answers(directory)


def test_experts_stay_quantized(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """As records, or as the floats that they mean; a part that is read may end within an expert."""
    monkeypatch.setattr(sources, "_CHUNK_VALUES", 100 * 64)
    model_dir = save_model(tmp_path / "model", **MIXTURE)
    path = write_gguf(tmp_path / "model.gguf", model_dir, "Q8_0", kinds={"mlp.gate.": "F32"})
    config = load_model_config(path)
    kept, floats = (load_weights(path, config, torch.float32, keep_quantized=keep) for keep in (True, False))
    for ours, theirs in zip(kept.layers, floats.layers, strict=True):
        assert ours.experts is not None and theirs.experts is not None
        for record, matrix in zip(
            (*ours.experts.up, *ours.experts.down), (*theirs.experts.up, *theirs.experts.down), strict=True
        ):
            assert isinstance(record, QuantizedLinear) and isinstance(matrix, Linear)
            assert torch.equal(record.dense(torch.float32), matrix.weight)
    plain = load_weights(model_dir, load_model_config(model_dir), torch.float32)
    assert plain.layers[1].experts is not None and floats.layers[1].experts is not None
    for matrix, exact in zip(floats.layers[1].experts.up, plain.layers[1].experts.up, strict=True):
        assert (matrix.dense(torch.float32) - exact.dense(torch.float32)).abs().max() < 0.01
    assert [len(each) for each in greedy_answers(path)] == [12] * len(PROMPTS)


def test_factors_of_frequencies_stand_for_llama_3(model_dir, tmp_path):
    directory = model_dir("llama3")
    rotary = load_model_config(directory).rotary
    assert rotary is not None
    plain = frequencies(dataclasses.replace(rotary, scaling=None), 64)
    factors = (plain / frequencies(rotary, 64)).numpy()
    assert factors.max() > 2, "some frequencies are slowed"
    path = write_gguf(tmp_path / "model.gguf", directory, vectors={"rope_freqs.weight": factors})
    ours = load_model_config(path).rotary
    assert ours is not None and isinstance(ours.scaling, FactorScaling)
    assert torch.allclose(frequencies(ours, 64), frequencies(rotary, 64), rtol=1e-6)
    assert greedy_answers(path) == greedy_answers(directory)


def test_longrope_of_phi_3(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 128,
    }
    directory = save_model(
        tmp_path / "directory", architecture="Phi3ForCausalLM", num_key_value_heads=2, rope_parameters=rope,
        original_max_position_embeddings=128,
    )  # fmt: skip
    path = write_gguf(
        tmp_path / "model.gguf",
        directory,
        vectors={f"rope_factors_{each}.weight": np.array(rope[f"{each}_factor"]) for each in ("short", "long")},
        numbers={"phi3.rope.scaling.original_context_length": 128},
    )
    ours, theirs = load_model_config(path).rotary, load_model_config(directory).rotary
    assert ours is not None and theirs is not None
    for max_len in (128, 129):  # by the short and by the long factors
        tables = (rotary_tables(rotary, max_len, torch.float32) for rotary in (ours, theirs))
        for own, other in zip(*tables, strict=True):
            assert torch.allclose(own, other, atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_exact_types_give_the_same_tokens(kind, tmp_path):
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    directory = save_model(tmp_path / "directory", dtype=dtype, **SHAPES["gqa"])
    path = write_gguf(tmp_path / "model.gguf", directory, kind)
    assert load_model_config(path).checkpoint_dtype == str(dtype).removeprefix("torch.")
    assert greedy_answers(path) == greedy_answers(directory)


def test_a_mixture_of_types_is_kept_as_it_is(wide_dir, tmp_path):
    """As the files named Q4_K_M: values and the way down in six bits, here with a matrix of floats besides."""
    kinds = {"v_proj": "Q6_K", "layers.0.mlp.down": "Q6_K", "layers.1.self_attn.k_proj": "F16", "lm_head": "Q8_0"}
    path = write_gguf(tmp_path / "model.gguf", wide_dir, "Q4_K", kinds=kinds)
    config = load_model_config(path)
    told: list[float] = []
    kept = load_weights(path, config, torch.float32, progress=told.append)
    assert told == sorted(told) and told[-1] == 1.0
    first, second = kept.layers
    assert isinstance(first.qkv, JoinedLinear) and [(p.bits, p.group) for p in first.qkv.parts] == [(4, 32), (8, 16)]
    assert isinstance(first.down, QuantizedLinear) and first.down.bits == 8
    assert isinstance(second.up, QuantizedLinear) and second.up.bits == 4 and second.up.minima is not None
    assert isinstance(kept.lm_head, QuantizedLinear)
    plain = load_weights(path, config, torch.float32, keep_quantized=False)
    for ours, theirs in zip(kept.layers, plain.layers, strict=True):
        for name in ("qkv", "out", "up", "down"):
            assert torch.equal(getattr(ours, name).dense(torch.float32), getattr(theirs, name).weight)
    assert isinstance(plain.lm_head, torch.Tensor)
    assert torch.equal(kept.lm_head.dense(torch.float32), plain.lm_head)
    assert torch.equal(kept.embedding, plain.embedding)
    assert isinstance(second.qkv, Linear), "one part is not quantised, so the layer is not"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_quantized_models_run_compiled(kind, wide_dir, tmp_path):
    """The compiled kernels round activations to 8 bits; the tokens agree as far as that changes no best one."""
    path = write_gguf(tmp_path / "model.gguf", wide_dir, kind)
    directory = dequantized(path, wide_dir, tmp_path / "plain")
    engine = Engine(path, dtype="float32", engine=SMALL)
    runner = engine.worker.runner
    assert isinstance(runner, ModelRunner) and isinstance(runner.backend, NativeBackend)
    ours, theirs = greedy_answers(path, "torch"), greedy_answers(directory, "torch")
    assert ours == theirs
    reference = load_reference(directory)
    for prompt, output in zip(PROMPTS, greedy_answers(path, "native"), strict=True):
        assert_greedy(reference, prompt, output, margin=1.5)  # one of the best


def test_matrices_are_read_in_parts(wide_dir, tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = write_gguf(tmp_path / "model.gguf", wide_dir, "Q4_K")
    config = load_model_config(path)
    whole = [flat(load_weights(path, config, torch.float32, keep_quantized=keep)) for keep in (True, False)]
    monkeypatch.setattr(sources, "_CHUNK_VALUES", 256 * 7)
    parts = [flat(load_weights(path, config, torch.float32, keep_quantized=keep)) for keep in (True, False)]
    for ours, theirs in zip(parts, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_ranks_read_their_parts(wide_dir, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", wide_dir, "Q8_0")
    source = open_checkpoint(path, load_model_config(path))
    whole = source.rows("blk.0.attn_q.weight")
    plain = load_weights(path, load_model_config(path), torch.float32, keep_quantized=False)
    assert torch.equal(whole, plain.layers[0].qkv.dense(torch.float32)[: len(whole)])


REFUSED: list[tuple[str, Any, str]] = [
    ("general.architecture", "mamba", r"one of llama, .*\[\[replica\]\]"),
    ("general.architecture", None, "architecture"),
    ("llama.expert_count", 8, "expert_used_count: got None"),  # Mixtral's
    ("llama.expert_used_count", 2, r"expert_used_count: got 2, expected 0.*\[\[replica\]\]"),
    ("split.count", 3, "llama-gguf-split"),
    ("llama.block_count", "2", "block_count"),
    ("llama.block_count", None, "block_count"),
    ("llama.block_count", 1 << 40, "block_count: got 1099511627776, expected at most 4096"),
    ("llama.attention.head_count", 0, "head_count"),
    ("llama.attention.head_count", np.array([4, 4]), "head_count: got 'an array'"),
    ("llama.attention.head_count_kv", 3, "num_key_value_heads"),
    ("llama.attention.key_length", 0, "key_length"),
    ("llama.attention.value_length", 8, "value_length"),
    ("llama.attention.layer_norm_rms_epsilon", float("nan"), "epsilon"),
    ("llama.context_length", None, "context_length"),
    ("llama.rope.scaling.type", "ntk", r"scaling.type: got 'ntk'.*\[\[replica\]\]"),
    ("llama.rope.scaling.type", "yarn", "original_context_length"),
    ("llama.rope.dimension_count", 8, "dimension_count"),
    ("llama.rope.freq_base", float("inf"), "freq_base"),
    ("tokenizer.ggml.eos_token_id", 1 << 31, "eos_token_id"),
]


@pytest.mark.parametrize(("key", "value", "named"), REFUSED)
def test_what_cannot_be_computed_is_refused(key, value, named, tiny_model_dir, tmp_path):
    file = read_gguf(write_gguf(tmp_path / "model.gguf", tiny_model_dir))
    metadata = {name: held for name, held in (*file.metadata.items(), (key, value)) if held is not None}
    if value is None:
        del metadata[key]
    with pytest.raises(InvalidValueError, match=named):
        config_of(dataclasses.replace(file, metadata=metadata))


def test_other_tensors_than_the_models_are_named(tiny_model_dir, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model_dir, vectors={"blk.7.attn_norm.weight": np.ones(64)})
    with pytest.raises(CheckpointError, match=r"blk\.7\.attn_norm"):
        check_checkpoint(path, load_model_config(path))
    path = write_gguf(tmp_path / "model.gguf", tiny_model_dir, numbers={"llama.feed_forward_length_": 3})
    config = dataclasses.replace(load_model_config(path), intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"ffn_.*96"):
        check_checkpoint(path, config)


def test_a_directory_with_one_file_is_that_file(tiny_model_dir, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model_dir)
    assert resolve_model_dir(str(tmp_path)) == path
    (tmp_path / "b.gguf").write_bytes(path.read_bytes())
    with pytest.raises(InvalidValueError, match=r"a\.gguf"):
        resolve_model_dir(str(tmp_path))


LOAD = """
import sys
from pathlib import Path
import torch
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.weights import load_weights

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))

torch.set_num_threads(1)
path = Path(sys.argv[1])
config, before = load_model_config(path), peak()
weights = load_weights(path, config, torch.bfloat16, keep_quantized=False)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for a process's peak of memory")
@pytest.mark.nightly
def test_a_load_takes_little_more_memory_than_the_weights(tmp_path):
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    directory = save_model(tmp_path / "directory", dtype=torch.bfloat16, **sizes)
    for path in (directory, write_gguf(tmp_path / "bf16.gguf", directory, "BF16")):
        done = subprocess.run([sys.executable, "-c", LOAD, str(path)], check=True, capture_output=True, text=True)
        growth, weights = int(done.stdout) << 10, 2 * num_parameters(load_model_config(path))
        assert weights > 100 << 20
        assert weights < growth < 1.3 * weights + (48 << 20), (path, growth >> 20, weights >> 20)


def test_a_quantised_file_computes_in_floats_where_asked(wide_dir, tmp_path, caplog):
    """The start says what is rounded otherwise."""
    path = write_gguf(tmp_path / "model.gguf", wide_dir, "Q4_K")

    def logprobs(weights: str, backend: str) -> torch.Tensor:
        caplog.clear()
        engine = Engine(path, dtype="float32", engine=dataclasses.replace(SMALL, weights=weights, backend=backend))
        engine.submit(PROMPTS[2][:32], SamplingParams(1, logprobs=200))
        (delta,) = engine.step()
        assert delta.logprobs is not None
        ids, values = delta.logprobs.output[0]
        return torch.tensor([value for _, value in sorted(zip(ids, values, strict=True))[:200]])

    rounded = logprobs("full", "native")
    assert "4 bits" in caplog.text and "--weights float" in caplog.text
    floats = logprobs("float", "native")
    assert "--weights" not in caplog.text
    exact = logprobs("float", "torch")
    assert torch.allclose(floats, exact, atol=1e-5)
    assert not torch.allclose(rounded, exact, atol=1e-4)
    logprobs("int8", "native")
    assert "--weights" not in caplog.text
