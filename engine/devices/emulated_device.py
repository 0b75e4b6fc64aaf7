"""From a profile and a configuration to an emulated device, with pools that exist as numbers only."""

from __future__ import annotations

from tokenizers import Tokenizer

from core.config.engine import EngineConfig
from core.errors import ConfigError, InvalidValueError
from engine.checkpoint.model_config import DecoderConfig
from engine.devices.device import Device, num_host_pool_blocks, num_pool_blocks
from engine.devices.emulated import EmulatedCopier, EmulatedRunner
from engine.sequence import Detokenizer
from estimator.device_profile import DeviceProfile, find_device_profile


def emulate_device(config: DecoderConfig, tokenizer: Tokenizer, engine: EngineConfig, *, swaps: bool = False) -> Device:
    """A device whose work takes as long as its profile says. It uses only vocabulary and context of the model.

    Args:
        swaps: Whether there is use for a host pool.

    Raises:
        InvalidValueError: there is no such profile, or it does not say what is needed; names the field.
    """
    profile = find_device_profile(engine.profile)
    # An emulated model has no positions: any length works.
    context_len = engine.max_model_len or config.max_position_embeddings
    num_blocks = num_pool_blocks(engine, profile.kv_bytes, context_len, profile.kv_memory or None)
    auto_blocks = num_blocks if swaps and profile.copy_bandwidth else 0
    num_host_blocks = num_host_pool_blocks(engine, profile.kv_bytes, auto_blocks, None)
    runner = EmulatedRunner(profile.cost, text_token_ids(config, tokenizer))
    copier = EmulatedCopier(_block_s(profile, engine)) if num_host_blocks else None
    return Device(runner, context_len, profile.kv_bytes, num_blocks, num_host_blocks, copier)


def text_token_ids(config: DecoderConfig, tokenizer: Tokenizer) -> list[int]:
    """The tokens that are text and do not end an output.

    Raises:
        InvalidValueError: there are none.
    """
    ends = {*Detokenizer(tokenizer).special_ids, *config.eos_token_ids}
    ids = sorted(token_id for token_id in tokenizer.get_vocab().values() if token_id < config.vocab_size)
    ids = [token_id for token_id in ids if token_id not in ends]
    if not ids:
        raise InvalidValueError("tokenizer.json", tokenizer.get_vocab_size(), "tokens that are not special")
    return ids


def _block_s(profile: DeviceProfile, engine: EngineConfig) -> float:
    """Seconds of the copy of a block."""
    if not profile.copy_bandwidth:
        expected = "a profile with copy_bandwidth where there is a host pool (engine.host_kv_memory)"
        raise ConfigError("engine.device", engine.device, expected)
    return engine.kv_block_size * profile.kv_bytes / profile.copy_bandwidth
