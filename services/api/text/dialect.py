"""How the served model writes: what its single tokens stand for, its tool calls and its reasoning."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from farsight.core.request import ReasoningBudget
from farsight.tokenization.text_stream import TextDecoder, TokenBytes, special_ids
from farsight.tokenization.tool_formats.formats import (
    FORMATS,
    ToolFormat,
    format_of,
    reasons,
)
from farsight.tokenization.tool_formats.parts import OutputForm


class Dialect:
    """The format of one model.

    Args:
        template: Source of its chat template; empty if there is none.
        tool_format: Name of the form of its calls; ``auto`` finds it from the template.

    Attributes:
        format: How it writes tool calls.
        reasons: Whether it may reason before it answers.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, tool_format: str = "auto") -> None:
        self.format: ToolFormat = format_of(template) if tool_format == "auto" else FORMATS[tool_format]
        self.reasons = reasons(template)
        special = special_ids(tokenizer)
        markers = (*self.format.markers, *self.format.think)
        found = {marker: tokenizer.token_to_id(marker) for marker in markers}
        self._special = {marker: token_id for marker, token_id in found.items() if token_id in special}
        self._reasoning = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in self.format.think]

    def token_id(self, text: str) -> int | None:
        """The special token that a text is; None for any other text."""
        return self._special.get(text)

    def budget(self, form: OutputForm | None, num_tokens: int | None) -> ReasoningBudget | None:
        """What bounds the reasoning of an output to so many tokens; None without a bound, or without reasoning."""
        if num_tokens is None or form is None or not form.reasons:
            return None
        begin, end = self._reasoning
        return ReasoningBudget(num_tokens, () if form.in_reasoning else begin, end)

    def form(
        self,
        rendered: str,
        tools: Sequence[str],
        *,
        forced: bool = False,
        parallel: bool = True,
        shows_reasoning: bool = True,
        reasons: bool = True,
        custom: Sequence[str] = (),
        texts: Iterable[tuple[str, str]] = (),
    ) -> OutputForm | None:
        """What an output behind this prompt may hold beside text; None for nothing.

        Args:
            tools: Names that it may call.
            forced: Whether it is calls alone.
            parallel: Whether it may hold several calls.
            reasons: Whether the output may begin with reasoning, if the model does that.
            custom: Names of tools that take one text.
            texts: Tools and those of their arguments that are texts.
        """
        if not tools and not self.reasons:
            return None
        may_reason = self.reasons and reasons
        in_reasoning = may_reason and rendered.rstrip().endswith(self.format.think[0].rstrip())
        lead = may_reason, in_reasoning, shows_reasoning
        return OutputForm(self.format.name, tuple(tools), *lead, forced, parallel, tuple(custom), frozenset(texts))

    def shown_ids(self) -> tuple[int, ...]:
        """Special tokens that a parser has to see."""
        return tuple(sorted(self._special.values()))


class TokenTexts:
    """Texts of single tokens of one tokenizer.

    Attributes:
        decoder: Decodes several tokens together.
        data: The bytes of a token: UTF-8, or a part of it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decoder = TextDecoder(tokenizer)
        self.data = TokenBytes(tokenizer).of
        self._names_ids = False

    def named(self, *, by_id: bool) -> TokenTexts:
        """The same, or with names such as ``token_id:5``."""
        if not by_id:
            return self
        names = copy.copy(self)
        names._names_ids = True
        return names

    def text(self, token_id: int) -> str:
        """U+FFFD stands for bytes that are no character."""
        if self._names_ids:
            return f"token_id:{token_id}"
        return self.data(token_id).decode(errors="replace")

    def name(self, token_id: int) -> str:
        """The text, or as OpenAI writes it ``bytes:\\xe2\\x82`` where the bytes alone are none."""
        if self._names_ids:
            return self.text(token_id)
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
