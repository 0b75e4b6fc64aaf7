"""Which tokens of a tokenizer are control tokens: tokens that mark speakers and tool calls in a prompt."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from tokenizers import Tokenizer

_MARKER = re.compile(r"[<\[{].+[>\]}]", re.DOTALL)
"""The form of markers that many tokenizers do not declare special, such as ``<think>`` and ``<|fim_prefix|>``."""

_HTML = re.compile(
    "</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|span|strong|sub|sup|table|tbody|td|tfoot|th"
    "|thead|tr|u|ul)>"
)
"""Added tokens that stand for ordinary text in the form of markers, as Gemma has them."""


def control_ids(tokenizer: Tokenizer, named: Collection[str] = (), templates: Iterable[str] = ()) -> frozenset[int]:
    """Ids of the control tokens among the added tokens.

    They are the special ones, those that a configuration names or a chat template writes, and all that have the form
    of a marker. What is left is text in one token: runs of spaces, HTML tags, words.

    Args:
        named: Texts of tokens with a role, such as ``eos_token`` of ``tokenizer_config.json``.
        templates: Sources of the chat templates.
    """
    sources = list(templates)
    found = set()
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        text = token.content
        is_marker = _MARKER.fullmatch(text) is not None and _HTML.fullmatch(text) is None
        is_word = not text.strip("\u2581").strip() or text.isalnum()
        is_written = not is_word and any(text in source for source in sources)
        if token.special or text in named or is_marker or is_written:
            found.add(token_id)
    return frozenset(found)
