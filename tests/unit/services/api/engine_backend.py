"""A real engine with a tiny model behind the HTTP layer, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from farsight.core.config.engine import EngineConfig
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request
from farsight.engine.engine import Engine
from farsight.services.api.generation import PromptText
from tests.unit.services.api.api_support import MAX_MODEL_LEN, VOCAB_SIZE, ScriptedBackend, write_model_dir


def write_checkpoint(folder: Path) -> Path:
    """Random weights for the tokenizer and the template of ``write_model_dir``; ``</s>`` is EOS."""
    write_model_dir(folder)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 0.5)
    model.save_pretrained(folder)
    return folder


class EngineBackend(ScriptedBackend):
    """Runs requests on an engine that steps whenever there is something to do."""

    def __init__(self, model_dir: Path, kv_memory: str = "4MiB", block_size: int = 8) -> None:
        super().__init__()
        config = EngineConfig(
            kv_memory=kv_memory, block_size=block_size, num_threads=1, prefix_cache=False
        )  # usage is the same each time
        self.engine = Engine(model_dir, dtype="float32", engine=config)
        self._queues: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        self.calls.append((request.prompt_ids, request.sampling))
        request_id = self.engine.submit(request.prompt_ids, request.sampling)
        queue = self._queues[request_id] = asyncio.Queue()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        reason = None
        try:
            while reason is None:
                delta = await queue.get()
                reason = delta.finish_reason
                yield delta
        finally:
            del self._queues[request_id]
            if reason is None:
                self.engine.abort(request_id)

    async def _step(self) -> None:
        while not self.engine.idle:
            for delta in self.engine.step():
                if delta.request_id in self._queues:
                    self._queues[delta.request_id].put_nowait(delta)
            await asyncio.sleep(0)
