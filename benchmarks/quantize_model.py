"""Writes a checkpoint as compressed-tensors: ``python -m benchmarks.quantize_model --model DIR --to w8a8 --out DIR``.

``w8a8`` has 8 bits and one scale for each output (the server quantises activations, a row at a time), ``w4a16`` 4 bits
and one scale for each 128 inputs. Both servers of ``benchmarks.peers`` read the same file.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128
VALUES_PER_WORD = 8
KEPT = ("embed_tokens", "lm_head")
"""Matrices that stay as they are."""


def main() -> None:
    """Writes the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--to", choices=FORMATS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config, pack = FORMATS[args.to]
    shutil.copytree(args.model, args.out, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(args.model / "model.safetensors").items():
        is_packed = tensor.ndim == 2 and not any(word in name for word in KEPT)
        found = pack(tensor.float()) if is_packed else {"weight": tensor}
        weights |= {f"{name.removesuffix('weight')}{end}": part.contiguous() for end, part in found.items()}
    save_file(weights, args.out / "model.safetensors", {"format": "pt"})
    own = json.loads((args.model / "config.json").read_text())
    (args.out / "config.json").write_text(json.dumps({**own, "quantization_config": config}, indent=1))


def w8a8(matrix: Tensor) -> dict[str, Tensor]:
    """Integers of 8 bits and a scale for each row. matrix: (outputs, inputs)."""
    scales = matrix.abs().amax(1, keepdim=True) / 127
    return {"weight": (matrix / scales).round().to(torch.int8), "weight_scale": scales.to(torch.bfloat16)}


def w4a16(matrix: Tensor) -> dict[str, Tensor]:
    """Integers of 4 bits, from -8 on, eight to an int32, and a scale for each group. matrix: (outputs, inputs)."""
    groups = matrix.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2, keepdim=True) / 7
    values = ((groups / scales).round() + 8).flatten(1).to(torch.int64)
    words = (values.unflatten(1, (-1, VALUES_PER_WORD)) << (4 * torch.arange(VALUES_PER_WORD))).sum(2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": scales.squeeze(2).to(torch.bfloat16),
        "weight_shape": torch.tensor(matrix.shape),
    }


def _config(stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    numbers = {"type": "int", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": numbers | weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INPUTS = {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}

FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], dict[str, Tensor]]]] = {
    "w8a8": (_config("int-quantized", {"num_bits": 8, "strategy": "channel"}, INPUTS), w8a8),
    "w4a16": (_config("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}, None), w4a16),
}

if __name__ == "__main__":
    main()
