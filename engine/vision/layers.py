"""What vision towers are made of. Torch operations; numerics follow transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.vision.stored import TowerTensors


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
