"""From the directory of an encoder to a device that computes whole prompts and keeps no KV."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError
from farsight.core.processors import compute_threads
from farsight.core.request import Fault
from farsight.engine.checkpoint.dtypes import dtype_of_name
from farsight.engine.checkpoint.encoder_config import EncoderConfig, resolve_encoder_len
from farsight.engine.models.encoder import EncoderModel, EncoderText
from farsight.engine.runner import Device, Runner
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import LoggedTokens, NoToken, PooledRows
from farsight.kvcache import StepBatch

_NO_TOKEN_ID = 0
"""Stands for the token of a request that generates nothing: for the books alone."""


class EncoderRunner(Runner):
    """Steps of an encoder.

    Its tokens attend to those behind them, so a prompt is computed as a whole, by the step that takes its last tokens;
    a step with an earlier chunk computes nothing of it.
    """

    def __init__(self, model: EncoderModel) -> None:
        self.model = model

    def execute(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Returns the vectors of the prompts that end in this step."""
        found = LoggedTokens([None] * len(batch.items), {})
        scored, embedded = [], []
        for i, item in enumerate(batch.items):
            if not item.samples:
                continue
            pooling = sequences[item.request_id].sampling.pooling
            if pooling == "score" and self.model.config.num_labels:
                scored.append(i)
            elif pooling == self.model.config.sentence.pooling and not self.model.config.num_labels:
                embedded.append(i)
            else:
                found.failures[i] = NoToken(f"this encoder does not compute {pooling or 'tokens'}", Fault.REQUEST)
        for items, compute in ((scored, self.model.scores), (embedded, self.model.embeddings)):
            texts = [_text(sequences[batch.items[i].request_id]) for i in items]
            for i, vector in zip(items, compute(texts).numpy() if items else (), strict=True):
                found[i] = _NO_TOKEN_ID
                found.pooled[i] = PooledRows(1, vector)
        return found if found.tells_more else list(found)


def _text(sequence: Sequence) -> EncoderText:
    return EncoderText(sequence.request.prompt_ids, sequence.sampling.second_at)


def load_encoder_device(
    model_dir: Path, config: EncoderConfig, dtype_name: str, engine: EngineConfig, num_replicas: int
) -> Device:
    """Loads the encoder. Its pool is a number that bounds nothing: it holds no KV.

    Args:
        num_replicas: Workers that share this machine's cores where a setting is automatic.

    Raises:
        InvalidValueError: The model or a setting cannot be used; names the field.
    """
    if engine.device != "cpu":
        raise ConfigError("engine.device", engine.device, "cpu: an encoder is computed by the processor")
    torch.set_num_threads(compute_threads(engine.num_threads, num_replicas))
    dtype = torch.float32 if dtype_name == "auto" else dtype_of_name(dtype_name)
    context_len = resolve_encoder_len(config, engine.max_model_len) + 1  # one more for the books' own token
    num_blocks = -(-context_len // engine.kv_block_size) * engine.max_num_seqs
    model = EncoderModel.from_dir(model_dir, config, dtype)
    return Device(EncoderRunner(model), context_len, 0, num_blocks, 0, None, exact=True)
