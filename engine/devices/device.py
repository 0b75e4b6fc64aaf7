"""The device that a worker computes on, real or emulated."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.engine import EngineConfig
from core.errors import ConfigError
from engine.runner import Copier, Runner


@dataclass(frozen=True, slots=True)
class Device:
    """The parts of a worker that depend on the device, and the sizes of its pools.

    Attributes:
        context_len: Tokens a sequence may reach if the KV pool holds them.
        token_bytes: Bytes of the KV of one token.
        num_blocks: KV blocks of the pool.
        num_host_blocks: KV blocks of the host pool; 0 if there is none.
        copier: Copies between the two pools; None if there is no host pool.
        exact: Whether a token's logits depend on nothing else in its step, bit by bit (ADR 27).
    """

    runner: Runner
    context_len: int
    token_bytes: int
    num_blocks: int
    num_host_blocks: int
    copier: Copier | None
    exact: bool = False


def num_pool_blocks(engine: EngineConfig, token_bytes: int, context_len: int, free_bytes: int | None) -> int:
    """Blocks of the KV pool.

    Args:
        token_bytes: Bytes of the KV of one token.
        free_bytes: Bytes that ``auto`` takes at most; None for no bound.

    Raises:
        ConfigError: there is room for none.
    """
    block_bytes = token_bytes * engine.kv_block_size
    asked = engine.kv_bytes()
    full = -(-context_len // engine.kv_block_size) * engine.max_num_seqs  # more would never be held
    if asked is not None:
        blocks = asked // block_bytes
    else:
        blocks = full if free_bytes is None else min(free_bytes // block_bytes, full)
    if blocks < 1:
        raise ConfigError("engine.kv_memory", engine.kv_memory, f"room for at least one block of {block_bytes} bytes")
    return blocks


def num_host_pool_blocks(engine: EngineConfig, token_bytes: int, auto_blocks: int, free_bytes: int | None) -> int:
    """Blocks of the host pool; 0 for none.

    Args:
        auto_blocks: Blocks that ``auto`` takes, if they fit ``free_bytes``.
        free_bytes: Bytes that ``auto`` may take at most; None for no bound.

    Raises:
        ConfigError: there is room for none where one is asked for.
    """
    block_bytes = token_bytes * engine.kv_block_size
    asked = engine.host_kv_bytes()
    if asked is None:
        return auto_blocks if free_bytes is None else min(auto_blocks, free_bytes // block_bytes)
    if asked and asked < block_bytes:
        expected = f"auto, 0, or room for a block of {block_bytes} bytes"
        raise ConfigError("engine.host_kv_memory", engine.host_kv_memory, expected)
    return asked // block_bytes
