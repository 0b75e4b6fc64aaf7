"""Which attention computes on a GPU: the one place that knows the kernels by name, and their order."""

from __future__ import annotations

import logging
from collections.abc import Callable

from farsight.core.errors import ConfigError
from farsight.engine.attention.attention import AttentionBackend
from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.torch_attention import Bound, TorchAttention
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.kv_pool import KVPool

logger = logging.getLogger(__name__)

TORCH_BYTES = 1 << 30
"""Memory of a GPU that attention out of torch operations takes in a layer, beside keys and values of one sequence."""


def _triton(config: DecoderConfig, pool: KVPool, sizes: StepSizes) -> AttentionBackend | str:
    try:
        from farsight.engine.attention.triton_attention import TritonAttention, triton_problem
    except ImportError as error:
        return f"triton cannot be imported, torch for CUDA brings it ({error})"
    return triton_problem(config, pool) or TritonAttention.of_model(config, pool, sizes)


def _xformers(config: DecoderConfig, pool: KVPool, sizes: StepSizes) -> AttentionBackend | str:
    logging.getLogger("xformers").setLevel(logging.ERROR)  # it warns of an extension that is not needed
    try:
        from farsight.engine.attention.xformers_attention import (
            XformersAttention,
            gpu_operators,
            operator_problem,
            xformers_problem,
        )
    except ImportError as error:
        return f"xformers cannot be imported, the extra `gpu` installs it ({error})"
    operators = gpu_operators()
    problem = xformers_problem(config, pool.dtype, pool.block_size) or operator_problem(operators, config, pool)
    return problem or XformersAttention(operators, sizes)


KERNELS: dict[str, Callable[[DecoderConfig, KVPool, StepSizes], AttentionBackend | str]] = {
    "triton": _triton,
    "xformers": _xformers,
}
"""Attention by its name in ``engine.backend``, the fastest first (measured: ``docs/gpu.md``); makes it, or tells why it
cannot run the model."""


def gpu_attention(name: str, config: DecoderConfig, pool: KVPool, sizes: StepSizes) -> AttentionBackend:
    """Makes attention for a pool on a GPU, for the backend of that name; ``auto`` is the first of ``KERNELS`` that can.

    Args:
        sizes: Sizes of steps that it is made for.

    Raises:
        ConfigError: The kernels that were asked for are not available, or ``native``, which computes on the CPU.
    """
    if name == "native":
        raise ConfigError("engine.backend", name, f"auto, {', '.join(KERNELS)} or torch (native computes on the CPU)")
    if name == "torch":
        return _bounded(config, pool)
    problems = []
    for kind in KERNELS if name == "auto" else (name,):
        made = KERNELS[kind](config, pool, sizes)
        if not isinstance(made, str):
            return made
        problems.append(f"{kind}: {made}")
    if name != "auto":
        raise ConfigError("engine.backend", name, f"auto or torch ({problems[0]})")
    logger.warning("attention is computed by torch operations, slower than by kernels: %s", "; ".join(problems))
    return _bounded(config, pool)


def _bounded(config: DecoderConfig, pool: KVPool) -> TorchAttention:
    return TorchAttention.of_model(config, Bound.of_bytes(TORCH_BYTES, config, pool))
