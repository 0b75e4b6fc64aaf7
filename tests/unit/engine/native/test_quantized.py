"""Products with weights in 8 and 4 bits: the roundings of ADR 42, on every instruction set, in any tile."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from farsight.engine.checkpoint.quantized import JoinedLinear, QuantizedLinear, pack_nibbles
from farsight.engine.native.model import quantized_arguments
from tests.unit.engine.native.components import BUILDS, NIGHTLY_BUILDS, compiled_probe
from tests.unit.engine.native.exact_step import FUSED, exact_product, round_rows


class Probe:
    """Multiplies in the compiled code of one instruction set."""

    def __init__(self, build: str, folder: Path) -> None:
        self.fused = FUSED if build == "this processor" else build.startswith("avx")
        self._compiled = compiled_probe("quantized_probe.cpp", build, folder)

    def __call__(
        self,
        x: np.ndarray,
        weights: QuantizedLinear | JoinedLinear,
        *,
        rows: int = 1000,
        threads: int = 1,
        start: np.ndarray | None = None,
    ) -> np.ndarray:
        parts = quantized_arguments(weights)
        bias = None if weights.bias is None else weights.bias.float().numpy()
        out = np.full((len(x), weights.outputs), np.nan, np.float32) if start is None else start.copy()
        of_bias, of_x, of_out = (None if a is None else a.ctypes.data_as(ctypes.c_void_p) for a in (bias, x, out))
        self._compiled.probe(parts, len(parts), of_bias, of_x, len(x), rows, threads, start is not None, of_out)
        return out

    def exact(self, x: np.ndarray, weights: QuantizedLinear | JoinedLinear) -> np.ndarray:
        """What the contract says of this processor."""
        return exact_product(x, weights, fused=self.fused)

    def scale_type(self, weights: QuantizedLinear) -> int:
        kind: int = self._compiled.probe_scales(quantized_arguments(weights))
        return kind


@pytest.fixture(
    scope="module", params=[*BUILDS, *(pytest.param(build, marks=pytest.mark.nightly) for build in NIGHTLY_BUILDS)]
)
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Probe:
    return Probe(request.param, tmp_path_factory.mktemp("probe"))


def random_weights(
    n: int,
    k: int,
    bits: int,
    group: int,
    *,
    minima: bool = False,
    bias: bool = False,
    scales: str = "float32",
    between: tuple[int, int] = (-128, 127),
) -> QuantizedLinear:
    """Weights of which every stored value occurs, extremes included; ``between`` are those of 8 bits."""
    rng = torch.Generator().manual_seed(n * k + bits + group)
    low, high = (between[0], between[1] + 1) if bits == 8 else (0, 16)
    integers = torch.randint(low, high, (n, k), generator=rng)
    values = integers.to(torch.int8) if bits == 8 else pack_nibbles(integers)

    def floats(*shape: int) -> Tensor:
        if scales == "codes":
            factors = (torch.randn(n, k // 256, 1, generator=rng) * 0.001).half().float()
            codes = torch.randint(
                *((-128, 128) if group == 16 else (0, 64)), (n, k // 256, 256 // group), generator=rng
            )
            return (factors * codes).view(n, -1)
        found = torch.randn(shape, generator=rng) * 0.02
        return found.to(getattr(torch, scales)).float()

    shape = (n, k // group)
    return QuantizedLinear(
        values, floats(*shape), floats(*shape) if minima else None, bits, group, floats(n) if bias else None
    )


def random_rows(m: int, k: int) -> np.ndarray:
    return np.random.default_rng(m + k).normal(size=(m, k)).astype(np.float32)


FORMATS: dict[str, dict[str, Any]] = {
    "Q8_0": {"bits": 8, "group": 32, "scales": "float16"},
    "Q4_0": {"bits": 4, "group": 32, "scales": "float16"},
    "Q4_K": {"bits": 4, "group": 32, "minima": True},
    "Q5_K": {"bits": 8, "group": 32, "minima": True, "between": (0, 31)},
    "Q6_K": {"bits": 8, "group": 16, "between": (-32, 31)},
    "GPTQ": {"bits": 4, "group": 128, "minima": True, "scales": "float16"},
    "GPTQ of 8 bits": {"bits": 8, "group": 128, "minima": True, "scales": "float16"},
    "W8A8": {"bits": 8, "group": 384, "scales": "bfloat16"},
    "int8": {"bits": 8, "group": 128, "scales": "bfloat16"},
    "int4": {"bits": 4, "group": 32, "scales": "bfloat16", "bias": True},
    "groups of 12": {"bits": 4, "group": 12, "minima": True, "bias": True},
    "groups of 4": {"bits": 8, "group": 4},
    "small ones in groups of 12": {"bits": 8, "group": 12, "between": (-100, -37)},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_bit_is_that_of_the_contract(probe: Probe, name: str) -> None:
    """Outputs that fill no panel, rows that fill no tile."""
    for n, m in ((1, 1), (67, 7), (128, 13)):
        weights, x = random_weights(n, 384, **FORMATS[name]), random_rows(m, 384)
        exact = probe.exact(x, weights)
        assert np.array_equal(probe(x, weights), exact)
        start = random_rows(m, n)
        assert np.array_equal(probe(x, weights, start=start), start + exact)


CODED: dict[str, dict[str, Any]] = {
    "Q4_K": {"bits": 4, "group": 32, "minima": True, "scales": "codes"},
    "Q5_K": {"bits": 8, "group": 32, "minima": True, "scales": "codes", "between": (0, 31)},
    "Q6_K": {"bits": 8, "group": 16, "scales": "codes", "between": (-32, 31)},
}


@pytest.mark.parametrize("name", CODED)
def test_scales_that_are_codes_times_a_factor_stay_codes(probe: Probe, name: str) -> None:
    """As in GGUF files: the outputs are those of the same scales in float32, in less memory."""
    for n, m in ((1, 1), (67, 7), (128, 13)):
        weights = random_weights(n, 512, **CODED[name])
        assert probe.scale_type(weights) == 3
        x = random_rows(m, 512)
        exact = probe.exact(x, weights)
        assert np.array_equal(probe(x, weights), exact)
    weights.scales[0, 0] *= 1.001
    assert probe.scale_type(weights) == 0


@pytest.mark.parametrize(("bits", "stored"), [(8, (-128, 127, 0)), (8, (-31, 32, 0)), (4, (0, 15, 8))])
def test_the_integers_at_their_extremes(probe: Probe, bits: int, stored: tuple[int, ...]) -> None:
    """Scales of 1 leave the sums of integers as they are; products of the largest values do not saturate."""
    k = 1024
    rows = torch.stack([torch.full((k,), value) for value in stored])
    values = rows.to(torch.int8) if bits == 8 else pack_nibbles(rows)
    weights = QuantizedLinear(values, torch.ones(3, 1), None, bits, k)
    x = np.stack([np.full(k, 127), np.full(k, -127), np.where(np.arange(k) % 2, 127, -127)]).astype(np.float32)
    assert np.array_equal(round_rows(x, k)[1], np.ones((3, 1)))
    expected = x.astype(np.int64) @ (weights.dense(torch.float32).numpy().astype(np.int64)).T
    assert np.array_equal(probe(x, weights), expected.astype(np.float32))


def test_tiles_and_threads_change_no_bit(probe: Probe) -> None:
    x = random_rows(33, 256)
    for name in ("int8", "int4", "Q4_K", "Q6_K"):
        weights = random_weights(200, 256, **FORMATS[name])
        alone = probe(x, weights, rows=1)
        for rows in range(2, 34):
            assert np.array_equal(probe(x, weights, rows=rows), alone), (name, rows)
        assert np.array_equal(probe(x, weights, threads=3), alone), name


def test_parts_of_several_formats(probe: Probe) -> None:
    parts = (
        random_weights(128, 256, **FORMATS["Q4_K"]),
        random_weights(64, 256, **FORMATS["Q4_0"], bias=True),
        random_weights(64, 256, **FORMATS["Q8_0"]),
        random_weights(65, 256, **FORMATS["Q6_K"]),
    )
    weights = JoinedLinear(parts)
    x = random_rows(9, 256)
    exact = probe.exact(x, weights)
    assert np.array_equal(probe(x, weights), exact)
    assert np.array_equal(exact[:, :128], probe.exact(x, parts[0]))


def test_scales_take_as_little_memory_as_keeps_them_exact(probe: Probe) -> None:
    kinds = {"float32": 0, "bfloat16": 1, "float16": 2}
    for scales, expected in kinds.items():
        weights = random_weights(64, 64, 8, 32, scales=scales)
        assert probe.scale_type(weights) == expected


@pytest.mark.parametrize("value", [2.0**-24, 2.0**-14, 65504.0, 1 + 2.0**-10, -3 * 2.0**-24])
def test_scales_at_the_edges_of_half(probe: Probe, value: float) -> None:
    """Subnormal and largest ones come back as they were."""
    weights = QuantizedLinear(torch.ones(2, 16, dtype=torch.int8), torch.full((2, 1), value), None, 8, 16)
    x = np.full((1, 16), 127, np.float32)
    assert np.array_equal(probe(x, weights), np.full((1, 2), np.float32(16 * 127) * np.float32(value)))


def test_rows_that_are_nothing_or_lost(probe: Probe) -> None:
    """Zeros give 0; a value that is not finite makes every output of its row NaN, not a number that looks right."""
    weights = random_weights(70, 64, 4, 32)
    x = random_rows(6, 64)
    x[0], x[1], x[2, 40], x[3, 3], x[4, 63] = 0, 1e-38, np.nan, np.inf, -np.inf
    out = probe(x, weights)
    assert np.array_equal(out[:2], np.zeros((2, 70)))
    assert np.isnan(out[2:5]).all()
    assert np.array_equal(out[5:], probe.exact(x[5:], weights))
