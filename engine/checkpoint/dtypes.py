"""The dtype that a model is computed in."""

from __future__ import annotations

import torch

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.names import num_parameters

LARGE_MODEL_PARAMETERS = 500_000_000
"""Parameters above which ``auto`` keeps the checkpoint's own dtype: exactness would cost twice the memory and time."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str, config: DecoderConfig, device: str = "cpu") -> torch.dtype:
    """The dtype to compute in.

    ``auto`` is float32, in which a resumed sequence continues token for token, unless the model has more than
    ``LARGE_MODEL_PARAMETERS`` parameters: then it is the checkpoint's own. On a GPU it is the checkpoint's own if that
    has 16 bits, else bfloat16.

    Raises:
        InvalidValueError: not one of the known names.
    """
    if name == "auto" and device == "cuda":
        own = _DTYPES[config.checkpoint_dtype]
        return torch.bfloat16 if own is torch.float32 else own
    if name == "auto":
        return _DTYPES[config.checkpoint_dtype] if num_parameters(config) > LARGE_MODEL_PARAMETERS else torch.float32
    return dtype_of_name(name)


def dtype_of_name(name: str) -> torch.dtype:
    """
    Raises:
        InvalidValueError: not one of the known names.
    """
    if name not in _DTYPES:
        raise InvalidValueError("dtype", name, f"one of {['auto', *_DTYPES]}")
    return _DTYPES[name]
