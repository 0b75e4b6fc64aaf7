"""The families of models that the engine computes, by the names that a ``config.json`` has for them."""

from __future__ import annotations

from collections.abc import Mapping

from farsight.engine.checkpoint.families.deepseek import DEEPSEEK
from farsight.engine.checkpoint.families.gemma import GEMMA_LIKE
from farsight.engine.checkpoint.families.gpt import GPT_LIKE
from farsight.engine.checkpoint.families.hybrid import HYBRIDS
from farsight.engine.checkpoint.families.llama import LLAMA_LIKE
from farsight.engine.checkpoint.families.mixtures import MIXTURES
from farsight.engine.checkpoint.families.record import Architecture
from farsight.engine.checkpoint.families.remote import REMOTE

ARCHITECTURES: Mapping[str, Architecture] = {
    **LLAMA_LIKE,
    **GPT_LIKE,
    **GEMMA_LIKE,
    **MIXTURES,
    **DEEPSEEK,
    **HYBRIDS,
    **REMOTE,
}
"""Architectures by their name in ``config.json``."""
