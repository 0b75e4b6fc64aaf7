"""Ollama's API: chats, completions, embeddings, and what is served. Models are not managed by it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import re
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from farsight.core.errors import FarsightError
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import check_token_ids
from farsight.services.api.answers.parts import ChoiceParts, chat_logprobs, likeliest
from farsight.services.api.answers.replies import UsageFields
from farsight.services.api.answers.sse import EventStream
from farsight.services.api.backend import ModelInfo
from farsight.services.api.bodies import LargeBodyRoute
from farsight.services.api.dialects.ollama_body import (
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    ModelFields,
    ShowBody,
)
from farsight.services.api.dialects.running import Running, as_chat
from farsight.services.api.errors import ERRORS, ApiError
from farsight.services.api.generation import ChoiceResult, Generation
from farsight.services.api.middleware import OLLAMA_PATH, ollama_error
from farsight.services.api.requests import check_model, check_prompt_len
from farsight.services.api.text.dialect import TokenTexts
from farsight.tokenization.gguf_file import is_gguf, read_gguf
from farsight.tokenization.model_dir import model_file, read_json_file
from farsight.tokenization.tool_formats.parts import CallArguments, CallStart, OutputForm, ReasoningPart, TextPart

_TEXT_ALONE = OutputForm("hermes")
_FOREVER = timedelta(days=100 * 365)
_MANAGES = ("pull", "push", "create", "copy", "delete", "blobs/{digest}")
_MAX_HEADER = 100_000_000
"""Most bytes of the header of a safetensors file, as the format has it."""

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Embed = Callable[[dict[str, Any], Request], Awaitable[tuple[list[Any], int]]]
"""Embeddings of a body of ``/v1/embeddings``, and the tokens of its texts."""


class LineStream(EventStream):
    """Sends lines of JSON as they arrive."""

    media_type = "application/x-ndjson"


class OllamaWriter:
    """Writes one answer as lines: one for each part of its output, and a last one with what it took.

    Args:
        is_chat: Whether parts are messages; texts otherwise.
        began_ns: Monotonic time at which the request came.
        shows_context: Whether the last line has the token ids of prompt and output.
    """

    def __init__(
        self, generation: Generation, texts: TokenTexts, *, is_chat: bool, began_ns: int, shows_context: bool
    ) -> None:
        self._generation = generation
        self._texts = texts
        self._is_chat = is_chat
        self._began_ns = began_ns
        self._first_ns = 0
        self._shows_context = shows_context
        self._parts = ChoiceParts(generation.form or _TEXT_ALONE, generation.response_id, 0, stream=False)
        self._reason = "stop"
        self._output_ids: list[int] = []

    def opening(self) -> bytes:
        return b""

    def saw(self, delta: TokenDelta) -> None:
        """Notes when the first token has come."""
        if delta.num_tokens and not self._first_ns:
            self._first_ns = time.monotonic_ns()

    def output(self, index: int, delta: TokenDelta) -> bytes:
        self.saw(delta)
        if self._shows_context:
            self._output_ids += delta.token_ids
        said = self._said(delta.text, delta.finish_reason)
        if self._generation.shows_logprobs and delta.logprobs is not None:
            said = said or [self._part("")]
            said[0]["logprobs"] = self._logprobs(delta.logprobs.output)
        return b"".join(_line({**self._head(), **each, "done": False}) for each in said)

    def end(self, used: UsageFields) -> bytes:
        return _line({**self._head(), **self._part(""), **self._ended(used)})

    def failure(self, error: ApiError) -> bytes:
        return _line(ollama_error(error.status, error.body()["error"]))

    def reply(self, result: ChoiceResult, used: UsageFields) -> dict[str, Any]:
        self._output_ids = result.token_ids
        said = self._said(result.text, result.finish_reason)
        text = "content" if self._is_chat else "response"
        whole: dict[str, Any] = {"role": "assistant", text: ""} if self._is_chat else {text: ""}
        for each in said:
            for name, value in (each["message"] if self._is_chat else each).items():
                if name != "role" and value:
                    whole[name] = whole[name] + value if name in whole else value
        found: dict[str, Any] = {"message": whole} if self._is_chat else whole
        if self._generation.shows_logprobs:
            found["logprobs"] = self._logprobs(result.logprobs)
        return {**self._head(), **found, **self._ended(used)}

    def _said(self, text: str, reason: str | None) -> list[dict[str, Any]]:
        """Returns the parts of further text; calls are whole."""
        said: list[dict[str, Any]] = []
        call: dict[str, Any] = {}
        for part in self._parts.read(text, ended=reason is not None):
            match part:
                case TextPart():
                    said.append(self._part(part.text))
                case ReasoningPart():
                    said.append(self._part("", thinking=part.text))
                case CallStart():
                    call = {"id": self._parts.id_of(part), "function": {"index": part.index, "name": part.name}}
                case CallArguments():
                    call["function"]["arguments"] = _arguments(part.text)
                    said.append(self._part("", tool_calls=[call]))
        if reason is not None:
            self._reason = "length" if reason == "length" else "stop"
        return said

    def _part(self, text: str, **others: Any) -> dict[str, Any]:
        if self._is_chat:
            return {"message": {"role": "assistant", "content": text, **others}}
        return {"response": text, **others}

    def _head(self) -> dict[str, Any]:
        return {"model": self._generation.model, "created_at": _now()}

    def _logprobs(self, entries: Sequence[Any]) -> list[dict[str, Any]]:
        found = chat_logprobs(self._texts, likeliest(entries, self._generation.num_logprobs))
        return list(found["content"])

    def _ended(self, used: UsageFields) -> dict[str, Any]:
        now = time.monotonic_ns()
        first = self._first_ns or now
        context = {}
        if self._shows_context:
            context = {"context": [*self._generation.prompts[0].prompt_ids, *self._output_ids]}
        return {
            "done": True,
            "done_reason": self._reason,
            **context,
            "total_duration": now - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": used.prompt_tokens,
            "prompt_eval_duration": first - self._began_ns,
            "eval_count": used.completion_tokens,
            "eval_duration": now - first,
        }


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"arguments": text}  # a model's own words, where no grammar held it to JSON


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def ollama_routes(running: Running, embed: Embed) -> APIRouter:
    """Returns the routes.

    Args:
        embed: Raises ApiError where the served model makes no embeddings.
    """
    router = APIRouter(prefix=OLLAMA_PATH, tags=["ollama"], responses=ERRORS, route_class=LargeBodyRoute)

    async def answer(body: ChatBody | GenerateBody, request: Request) -> Response:
        began_ns = time.monotonic_ns()
        model, is_chat = running.backend.model, isinstance(body, ChatBody)
        if body.is_empty:
            return _loaded(body, model, is_chat=is_chat)
        # In a thread, since an image may stand in the body.
        chat = await asyncio.to_thread(as_chat, lambda: body.chat(model.names))
        if body.think and not running.encoder.dialect.reasons:
            message = f"think: got {body.think!r}, expected false or null: {model.name!r} does not support thinking"
            raise ApiError(message, param="think", code="invalid_value")
        generation = _fitted(await running.read(chat), body, model)
        generation = await running.begin(generation, request)
        writer = OllamaWriter(
            generation,
            running.encoder.texts,
            is_chat=is_chat,
            began_ns=began_ns,
            shows_context=isinstance(body, GenerateBody) and not body.raw,
        )
        return await running.answer(request, generation, writer, saw=writer.saw, stream=LineStream)

    @router.post("/chat")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await answer(body, request)

    @router.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        return await answer(body, request)

    @router.post("/embed")
    async def embed_texts(body: EmbedBody, request: Request) -> Response:
        began_ns = time.monotonic_ns()
        fields = {"input": body.input, "dimensions": body.dimensions}
        if body.truncate is not False:
            fields["truncate_prompt_tokens"] = -1
        rows, num_tokens = await vectors(body, fields, request)
        counts = {"total_duration": time.monotonic_ns() - began_ns, "load_duration": 0, "prompt_eval_count": num_tokens}
        return JSONResponse({"model": body.model or running.backend.model.name, "embeddings": rows, **counts})

    @router.post("/embeddings")
    async def embed_prompt(body: EmbeddingsBody, request: Request) -> Response:
        rows, _ = await vectors(body, {"input": body.prompt, "truncate_prompt_tokens": -1}, request)
        return JSONResponse({"embedding": rows[0] if rows else []})

    async def vectors(body: ModelFields, fields: dict[str, Any], request: Request) -> tuple[list[Any], int]:
        name = body.served(running.backend.model.names)
        check_model(name, running.backend.model)
        return await embed({"model": name, **fields}, request) if fields["input"] else ([], 0)

    @router.post("/show")
    async def show(body: ShowBody, request: Request) -> Response:
        model = running.backend.model
        check_model(body.served(model.names), model)
        facts = await asyncio.to_thread(facts_of, model)
        return JSONResponse(
            {
                "license": "",
                "modelfile": f"FROM {model.name}",
                "parameters": "",
                "template": running.encoder.template,
                "details": facts.details,
                "model_info": {**facts.info, f"{facts.family or 'model'}.context_length": model.max_model_len},
                "capabilities": _capabilities(running),
                "modified_at": facts.modified_at,
            }
        )

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        model = running.backend.model
        facts = await asyncio.to_thread(facts_of, model)
        return {"models": [{**facts.row(name), "modified_at": facts.modified_at} for name in model.names]}

    @router.get("/ps")
    async def running_models() -> dict[str, Any]:
        model = running.backend.model
        facts = await asyncio.to_thread(facts_of, model)
        until = (datetime.now(UTC) + _FOREVER).isoformat().replace("+00:00", "Z")
        return {"models": [{**facts.row(model.name), "expires_at": until, "context_length": model.max_model_len}]}

    @router.get("/version")
    async def server_version() -> dict[str, str]:
        return {"version": version("farsight")}

    managing = APIRouter(prefix=OLLAMA_PATH)  # not of JSON: no body of these is read
    for name in _MANAGES:
        managing.add_api_route(f"/{name}", _refuse_managing, methods=["POST", "DELETE"], include_in_schema=False)
    router.routes.extend(managing.routes)
    return router


async def _refuse_managing(request: Request) -> Response:
    what = request.url.path.removeprefix(OLLAMA_PATH).split("/")[1]
    message = f"{what}: models are not managed over HTTP; `farsight serve MODEL` chooses the one that is served"
    return ApiError(message, code="not_supported").response()


def _loaded(body: ChatBody | GenerateBody, model: ModelInfo, *, is_chat: bool) -> Response:
    """Answers an empty request, which would load the model or unload it.

    Raises:
        ApiError: 404: another model is served; 400: this one is not unloaded.
    """
    name = body.served(model.names)
    check_model(name, model)
    if body.unloads:
        message = f"keep_alive: got {body.keep_alive!r}, expected another: the served model stays loaded"
        raise ApiError(message, param="keep_alive", code="invalid_value")
    said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    head = {"model": name or model.name, "created_at": _now()}
    return JSONResponse({**head, **said, "done": True, "done_reason": "load"})


def _fitted(generation: Generation, body: ChatBody | GenerateBody, model: ModelInfo) -> Generation:
    """Returns the generation behind the context of its body, with what of the wanted output fits behind its prompt.

    Raises:
        ApiError, InvalidValueError: The context cannot go before the prompt.
    """
    [prompt] = generation.prompts
    if isinstance(body, GenerateBody) and body.context:
        check_token_ids("context", body.context, model.vocab_size)
        prompt = dataclasses.replace(prompt, prompt_ids=(*body.context, *prompt.prompt_ids))
    room = check_prompt_len("context" if prompt is not generation.prompts[0] else "prompt", prompt.prompt_len, model)
    wanted = (body.options and body.options.num_predict) or 0
    sampling = dataclasses.replace(prompt.sampling, max_new_tokens=min(wanted, room) if wanted > 0 else room)
    return dataclasses.replace(generation, prompts=(dataclasses.replace(prompt, sampling=sampling),))


def _capabilities(running: Running) -> list[str]:
    model, encoder = running.backend.model, running.encoder
    known = {
        "completion": model.abilities.generates,
        "embedding": bool(model.abilities.pooling),
        "tools": model.abilities.generates and encoder.chats,
        "thinking": encoder.dialect.reasons,
        "vision": model.image_input is not None,
    }
    return [name for name, has in known.items() if has]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the files of a model say.

    Attributes:
        family: Its architecture; empty where it is unknown.
        num_bytes: Bytes of its weights.
        digest: Names these files: hexadecimal.
        modified_at: RFC 3339.
        info: Numbers and names of its configuration.
    """

    family: str
    num_bytes: int
    digest: str
    modified_at: str
    details: dict[str, Any]
    info: dict[str, Any]

    def row(self, name: str) -> dict[str, Any]:
        """Returns the model as lists show it."""
        return {"name": name, "model": name, "size": self.num_bytes, "digest": self.digest, "details": self.details}


def facts_of(model: ModelInfo) -> ModelFacts:
    """Returns what is known of the files of the served model; they are read once for each version of the weights."""
    return _read_facts(model.root, model.version, model.created)


@lru_cache(maxsize=4)
def _read_facts(root: str, _version: int, created: int) -> ModelFacts:
    path = Path(root)
    files = [path] if is_gguf(path) else sorted(path.glob("*.safetensors")) if root else []
    states = [each.stat() for each in files]
    written = max((state.st_mtime for state in states), default=created)
    try:
        family, size, quantization, info = _of_gguf(path) if is_gguf(path) else _of_folder(path, files)
    except (FarsightError, OSError, ValueError, struct.error):
        # A model that other servers run has no files here; what is known of it is its name.
        family, size, quantization, info = "", 0, "", {}
    named = [(each.name, state.st_size, state.st_mtime_ns) for each, state in zip(files, states, strict=True)]
    return ModelFacts(
        family,
        sum(state.st_size for state in states),
        hashlib.sha256(repr((root, named)).encode()).hexdigest(),
        datetime.fromtimestamp(written, UTC).isoformat().replace("+00:00", "Z"),
        {
            "parent_model": "",
            "format": "gguf" if is_gguf(path) else "safetensors" if files else "",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": _in_words(size),
            "quantization_level": quantization,
        },
        {"general.architecture": family, "general.parameter_count": size, **info},
    )


def _of_gguf(path: Path) -> tuple[str, int, str, dict[str, Any]]:
    file = read_gguf(path)
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.kind] += math.prod(tensor.shape)
    plain = {key: value for key, value in file.metadata.items() if isinstance(value, str | int | float)}
    info = {key: value for key, value in plain.items() if not key.startswith("tokenizer.")}
    family = str(file.metadata.get("general.architecture", ""))
    return family, sizes.total(), sizes.most_common(1)[0][0] if sizes else "", info


def _of_folder(path: Path, files: Sequence[Path]) -> tuple[str, int, str, dict[str, Any]]:
    place = model_file(path, "config.json")
    config = {} if place is None else read_json_file(place)
    family = str(config.get("model_type", ""))
    size = sum(map(_num_values, files))
    method = (config.get("quantization_config") or {}).get("quant_method")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "vocab_size": "vocab_size",
    }
    info = {f"{family}.{name}": config[key] for key, name in names.items() if isinstance(config.get(key), int)}
    return family, size, str(method or _DTYPES.get(dtype, dtype)), info


def _num_values(path: Path) -> int:
    """Returns the number of values in a file of safetensors, by its header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(min(length, _MAX_HEADER)))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")


def _in_words(count: int) -> str:
    for letter, unit in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= unit:
            return re.sub(r"\.0$", "", f"{count / unit:.1f}") + letter
    return ""
