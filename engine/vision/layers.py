"""The tensors of a vision tower in a checkpoint, and the torch operations on them; numerics follow transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from farsight.engine.checkpoint.config_fields import CheckpointError
from farsight.engine.checkpoint.families.vision import VisionFamily
from farsight.engine.checkpoint.stored import FLOATS, stored_tensors

_IGNORED = ("position_ids", "rotary_pos_emb.inv_freq")
"""Ends of names of buffers that carry nothing."""


def read_tower(model_dir: Path, family: VisionFamily, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Reads all tensors of towers and projectors, by their names without ``model.``.

    Raises:
        CheckpointError: A damaged file, or a tensor that is quantised.
    """
    wanted = {name: each for name, each in stored_tensors(model_dir).items() if name.startswith(family.towers)}
    found: dict[str, Tensor] = {}
    for file in sorted({each.file for each in wanted.values()}):
        with safe_open(file, framework="pt", device=device) as opened:
            for name, each in wanted.items():
                if each.file != file or name.endswith(_IGNORED):
                    continue
                if each.dtype not in FLOATS:
                    raise CheckpointError(name, each.dtype, "float32, bfloat16 or float16: towers are not quantised")
                found[name.removeprefix("model.")] = opened.get_tensor(name).to(dtype)
    return found


class TowerTensors:
    """Tensors by name, each asked for with the shape that it must have."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """
        Raises:
            CheckpointError: There is none, or it has another shape.
        """
        found = self._tensors.get(name)
        if found is None:
            raise CheckpointError(name, "nothing", f"a tensor {list(shape)}")
        if tuple(found.shape) != shape:
            raise CheckpointError(name, str(list(found.shape)), f"a tensor {list(shape)}")
        self._taken.add(name)
        return found

    def ignore(self, *beginnings: str) -> None:
        """Passes over tensors that the tower has no use for."""
        self._taken.update(name for name in self._tensors if name.startswith(beginnings))

    def check_all_taken(self) -> None:
        """Raises CheckpointError if there is a tensor that nothing is computed with."""
        left = sorted(set(self._tensors) - self._taken)
        if left:
            raise CheckpointError(left[0], "a tensor of that name", f"only those of its tower ({len(left)} are more)")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": _quick_gelu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
}
"""By their names in a ``config.json``."""


@dataclass(frozen=True, slots=True)
class Dense:
    """``x @ weight.T + bias``."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def take(cls, tensors: TowerTensors, name: str, outputs: int, inputs: int, *, bias: bool = True) -> Dense:
        return cls(
            tensors.take(f"{name}.weight", outputs, inputs), tensors.take(f"{name}.bias", outputs) if bias else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """With weight and bias."""

    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def take(cls, tensors: TowerTensors, name: str, size: int, eps: float) -> LayerNorm:
        return cls(tensors.take(f"{name}.weight", size), tensors.take(f"{name}.bias", size), eps)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class RootNorm:
    """Root mean square, with a weight that is multiplied after rounding."""

    weight: Tensor
    eps: float

    @classmethod
    def take(cls, tensors: TowerTensors, name: str, size: int, eps: float) -> RootNorm:
        return cls(tensors.take(f"{name}.weight", size), eps)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, None, self.eps) * self.weight
