"""The families of models that the engine computes, by the names that a ``config.json`` has for them."""

from __future__ import annotations

from collections.abc import Mapping

from engine.checkpoint.families.deepseek import DEEPSEEK
from engine.checkpoint.families.gemma import GEMMA_LIKE
from engine.checkpoint.families.gpt import GPT_LIKE
from engine.checkpoint.families.llama import LLAMA_LIKE
from engine.checkpoint.families.mixtures import MIXTURES
from engine.checkpoint.families.record import Architecture as Architecture
from engine.checkpoint.families.record import Windows as Windows
from engine.checkpoint.families.remote import REMOTE

ARCHITECTURES: Mapping[str, Architecture] = {
    **LLAMA_LIKE,
    **GPT_LIKE,
    **GEMMA_LIKE,
    **MIXTURES,
    **DEEPSEEK,
    **REMOTE,
}
"""Architectures by their name in ``config.json``."""
