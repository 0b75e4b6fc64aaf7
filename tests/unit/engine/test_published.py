"""A published checkpoint is loaded and answers as recorded."""

from __future__ import annotations

from core.config.engine import EngineConfig
from core.request import SamplingParams
from engine import Engine
from tests.published import smollm2

CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def test_smollm2_answers_as_recorded() -> None:
    """The answer is that of transformers on the same weights; after it the model goes on about the answer itself."""
    engine = Engine(smollm2(), engine=EngineConfig(kv_memory="64MiB", num_threads=1))
    (completion,) = engine.generate([CHAT], [SamplingParams(7)])
    assert completion.token_ids == (504, 3575, 282, 4649, 314, 7042, 30)
    assert completion.text == "The capital of France is Paris."
