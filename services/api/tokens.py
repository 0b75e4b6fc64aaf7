"""``POST /tokenize`` and ``/detokenize``: what a prompt becomes, and the text of tokens; ``GET /tokenizer_info``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from farsight.core.request import check_token_ids
from farsight.services.api.access.keys import own_salt
from farsight.services.api.backend import Generator, ModelInfo
from farsight.services.api.bodies import JsonRoute, LargeBodyRoute
from farsight.services.api.errors import ERRORS
from farsight.services.api.fields import StrictModel, refused
from farsight.services.api.generate import while_connected
from farsight.services.api.requests import check_model, prompt_ids_of
from farsight.services.api.schemas import ChatTurn
from farsight.services.api.text.prompts import PromptEncoder
from farsight.tokenization.gguf_file import is_gguf
from farsight.tokenization.model_dir import model_file, read_json_file


class TokenizeRequest(ChatTurn):
    """A prompt, as for a completion, or messages, as for a chat."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="Prompts: false leaves out those of the tokenizer.")
    return_token_strs: bool | None = Field(None, description="Also the text of each token.")

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refused(".prompt", self.prompt, "either prompt or messages")
        return self


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class DetokenizeReply(BaseModel):
    prompt: str


def token_routes(backend: Generator, encoder: PromptEncoder, *, shares_across_keys: bool) -> APIRouter:
    """The routes. Other bodies of 64 KiB or more than those of chats with pictures get 413.

    Args:
        shares_across_keys: As for the application.
    """

    async def ids_of(body: TokenizeRequest, request: Request) -> tuple[int, ...]:
        if body.prompt is None:
            salt = own_salt(request.headers, "", shares_across_keys)
            return await while_connected(request.receive, prompt_ids_of(body, backend, encoder, salt))
        special = body.add_special_tokens is not False
        encoded = await asyncio.to_thread(encoder.encode_prompt, body.prompt, add_special_tokens=special)
        return encoded.ids

    class LargeChats(LargeBodyRoute):
        """Takes a large body where pictures make it large."""

        async def handle_large(self, request: Request, body: bytes) -> Response:
            may_be_large = self.path_format == "/tokenize" and backend.model.image_input is not None
            return await (LargeBodyRoute if may_be_large else JsonRoute).handle_large(self, request, body)

    router = APIRouter(tags=["tokens"], responses=ERRORS, route_class=LargeChats)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeReply:
        model = backend.model
        check_model(body.model, model)
        ids = await ids_of(body, request)
        names = [encoder.texts.text(token_id) for token_id in ids] if body.return_token_strs else None
        return TokenizeReply(count=len(ids), max_model_len=model.max_model_len, tokens=list(ids), token_strs=names)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's own configuration, and the chat template in use."""
        return await asyncio.to_thread(_tokenizer_info, backend.model, encoder)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeReply:
        check_model(body.model, backend.model)
        check_token_ids("tokens", body.tokens, backend.model.vocab_size)
        return DetokenizeReply(prompt=(await asyncio.to_thread(encoder.echo, body.tokens)).text)

    return router


def _tokenizer_info(model: ModelInfo, encoder: PromptEncoder) -> dict[str, Any]:
    path = (
        None if not model.root or is_gguf(Path(model.root)) else model_file(Path(model.root), "tokenizer_config.json")
    )
    found = {} if path is None else read_json_file(path)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_model_len,
        **found,
        "chat_template": encoder.template or None,
    }
