"""Bodies of Ollama's API (https://github.com/ollama/ollama/blob/main/docs/api.md), and the chats that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, PlainValidator

from farsight.core.errors import InvalidValueError
from farsight.core.images import ImageFile
from farsight.services.api.field_groups import MAX_CALLS
from farsight.services.api.fields import MAX_TOP_LOGPROBS, NO_EFFECT, NeutralOnly, StrictModel, refused, shown
from farsight.services.api.pictures.content import MixedContent, NoPicture, content_of, picture_from, picture_of
from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest, Stop

MAX_IMAGES = 64
MAX_CONTEXT_IDS = 1 << 20
_DURATION = re.compile(r"[+-]?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+|[+-]?\d+(\.\d+)?")
_ANSWERED_ALIKE: dict[str, NeutralOnly] = {
    "truncate": NO_EFFECT,  # a prompt that fits is answered alike, and one that does not fit is refused
    "shift": NO_EFFECT,
}


def _keep_alive(value: Any) -> float | str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (value is None or is_number or (isinstance(value, str) and _DURATION.fullmatch(value))):
        raise refused("", value, "a number of seconds, or a duration such as '5m'")
    return cast(float | str | None, value)


def _format(value: Any) -> Any:
    if value is not None and value not in ("", "json") and not isinstance(value, dict):
        raise refused("", value, "'json', or a JSON Schema as an object")
    return value


KeepAlive = Annotated[float | str | None, PlainValidator(_keep_alive, json_schema_input_type=float | str | None)]
Format = Annotated[Any, PlainValidator(_format, json_schema_input_type=Literal["", "json"] | dict[str, Any] | None)]


class OllamaOptions(StrictModel):
    """How an output is drawn; where one is not given it has the value of Ollama, but that no penalty is set."""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        # How Ollama loads a model, and what it drops of a conversation that does not fit.
        **dict.fromkeys(
            (
                "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv",
                "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "draft_num_predict",
            ),
            NO_EFFECT,
        ),
        "penalize_newline": NeutralOnly((True,), "a penalty looks at every token"),
        "tfs_z": NeutralOnly((1,), "use top_p or min_p"),
        "typical_p": NeutralOnly((1,), "use top_p or min_p"),
        "mirostat": NeutralOnly((0,), "use temperature, top_p or min_p"),
        "mirostat_tau": NO_EFFECT,
        "mirostat_eta": NO_EFFECT,
        "repeat_last_n": NeutralOnly((-1,), "repeat_penalty looks at the whole prompt and output"),
    }  # fmt: skip

    seed: int | None = Field(None, ge=-1, lt=2**64)
    num_predict: int | None = Field(
        None, ge=-2, description="Most tokens of the output; the context if it is 0 or less."
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stop: Stop = ()

    def sampling(self) -> dict[str, Any]:
        """Returns the fields of a chat or completion, with Ollama's defaults."""
        given = self.model_dump(exclude_none=True, exclude={"num_predict", "repeat_penalty"})
        defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
        return defaults | given | {"stop": list(self.stop), "repetition_penalty": self.repeat_penalty}


class ModelFields(StrictModel):
    """What bodies of all routes have."""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = _ANSWERED_ALIKE

    model: str | None = Field(None, description="A name that is served here, also with ':latest' behind it.")
    name: str | None = Field(None, description="The older name of model.")
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = Field(None, description="The served model stays loaded, whatever this says.")

    def served(self, names: Sequence[str]) -> str | None:
        """Returns the name without a tag that the served names do not have."""
        given = self.model or self.name
        plain = (given or "").removesuffix(":latest")
        return plain if given not in names and plain in names else given

    @property
    def unloads(self) -> bool:
        """Whether an empty request asks to unload the model."""
        return self.keep_alive is not None and not re.search("[1-9]", str(self.keep_alive))


class AnswerFields(ModelFields):
    """What chats and completions share."""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = _ANSWERED_ALIKE | {
        "_debug_render_only": NeutralOnly((False,), "/tokenize shows the prompt of a chat"),
    }

    stream: bool | None = Field(None, description="Lines of JSON as they come, unless it is false.")
    format: Format = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def _shared(self, names: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.served(names), "stream": self.stream is not False}
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            found["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": self.format}}
        return found | (self.options or OllamaOptions.model_validate({})).sampling()

    def _chat(self, names: Sequence[str], messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
        shown_logprobs = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = {"max": "xhigh"}.get(self.think, self.think)
        if self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": bool(self.think)}
        whole = {"messages": messages, **self._shared(names), **shown_logprobs, **fields}
        return ChatCompletionRequest.model_validate(whole)


class OllamaFunction(StrictModel):
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {"index": NO_EFFECT, "description": NO_EFFECT}

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: dict[str, Any] | None = None


class OllamaCall(StrictModel):
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {"type": NO_EFFECT, "index": NO_EFFECT}

    id: str | None = Field(None, max_length=256)
    function: OllamaFunction


class OllamaMessage(StrictModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = Field(None, max_length=MAX_IMAGES, description="In base64.")
    tool_calls: list[OllamaCall] | None = Field(None, max_length=MAX_CALLS)
    tool_name: str | None = Field(None, max_length=256, description="The function whose result this is.")
    tool_call_id: str | None = Field(None, max_length=256)

    def for_chat(self, place: str) -> dict[str, Any]:
        """Returns the message as one of a chat; raises InvalidValueError for an image that is none."""
        found: dict[str, Any] = {"role": self.role, "content": with_images(self.content or "", self.images, place)}
        given = {"reasoning_content": self.thinking, "name": self.tool_name, "tool_call_id": self.tool_call_id}
        found |= {name: value for name, value in given.items() if value}
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id or f"call_{index}",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments or {})},
                }
                for index, call in enumerate(self.tool_calls)
            ]
        return found


def with_images(text: str, images: Sequence[str] | None, place: str) -> str | MixedContent:
    """Returns the content of a message; raises InvalidValueError, which names the image, if one is none."""
    parts: list[str | ImageFile] = []
    for index, image in enumerate(images or ()):
        field = f"{place}images[{index}]"
        try:
            parts.append(picture_of(image, field) if image.startswith("data:") else picture_from(image, field))
        except NoPicture as error:
            raise InvalidValueError(field, shown(image), str(error)) from error
    return content_of([*parts, text]) if parts else text


class ChatBody(AnswerFields):
    """``POST /api/chat``"""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether this asks to load or unload the model alone."""
        return not self.messages

    def chat(self, names: Sequence[str]) -> ChatCompletionRequest:
        """Returns the chat that this is.

        Raises:
            InvalidValueError, ValidationError: A field cannot be in a chat.
        """
        messages = [each.for_chat(f"messages[{index}].") for index, each in enumerate(self.messages or ())]
        return self._chat(names, messages, tools=self.tools)


class GenerateBody(AnswerFields):
    """``POST /api/generate``"""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        **AnswerFields.neutral,
        "suffix": NeutralOnly(("",), "infilling before a suffix is not supported, put all text into the prompt"),
        "template": NeutralOnly(("",), "the model's own chat template is used; raw takes a prompt as it is"),
        "width": NeutralOnly((0,), "only text can be generated"),
        "height": NeutralOnly((0,), "only text can be generated"),
        "steps": NeutralOnly((0,), "only text can be generated"),
    }

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = Field(None, max_length=MAX_IMAGES, description="In base64.")
    raw: bool | None = Field(None, description="Whether the prompt is taken as it is, control tokens included.")
    context: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, max_length=MAX_CONTEXT_IDS, description="Token ids of an earlier answer, which the prompt goes on with."
    )

    @property
    def is_empty(self) -> bool:
        """Whether this asks to load or unload the model alone."""
        return not self.prompt

    def chat(self, names: Sequence[str]) -> ChatCompletionRequest | CompletionRequest:
        """Returns the chat that this is, or the completion where the prompt is raw; raises as ``ChatBody.chat``."""
        if self.raw:
            for name in ("system", "images", "context", "think"):
                if getattr(self, name):
                    raise InvalidValueError(name, "a value", "null where raw is true: the prompt is taken as it is")
            logprobs = (self.top_logprobs or 0) if self.logprobs else None
            whole = {"prompt": self.prompt or "", "parse_special": True, "logprobs": logprobs, **self._shared(names)}
            return CompletionRequest.model_validate(whole)
        if self.images and self.context:
            raise InvalidValueError("context", "a value", "null beside images")
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return self._chat(
            names, [*messages, {"role": "user", "content": with_images(self.prompt or "", self.images, "")}]
        )


class EmbedBody(ModelFields):
    """``POST /api/embed``"""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {}

    input: str | list[str] | None = None
    truncate: bool | None = Field(None, description="Whether a text that is too long is cut; true if not given.")
    dimensions: int | None = Field(None, ge=1)


class EmbeddingsBody(ModelFields):
    """``POST /api/embeddings``, the older form of one text."""

    prompt: str | None = None


class ShowBody(ModelFields):
    """``POST /api/show``"""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        **dict.fromkeys(("system", "template", "verbose"), NO_EFFECT),
    }
