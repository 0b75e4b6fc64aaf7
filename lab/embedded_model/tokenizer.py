"""The tokenizer of the embedded model: one token per UTF-8 byte, and four special tokens.

Ids: 0 ``<pad>``, 1 ``<s>`` (BOS), 2 ``</s>`` (EOS), 3 ``<sep>``, 4-7 reserved, ``8 + byte`` for every byte.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD: Final = "<pad>"
BOS: Final = "<s>"
EOS: Final = "</s>"
SEP: Final = "<sep>"
SPECIAL_TOKENS: Final = (PAD, BOS, EOS, SEP, *(f"<reserved_{index}>" for index in range(4)))
PAD_ID, BOS_ID, EOS_ID, SEP_ID = range(4)
BYTE_OFFSET: Final = len(SPECIAL_TOKENS)
"""Token id of the byte 0."""
VOCABULARY_SIZE: Final = BYTE_OFFSET + 256
MAX_POSITIONS: Final = 1024
"""Longest sequence (prompt and answer, tokens) the model accepts."""

CHAT_TEMPLATE: Final = (
    "{%- set ns = namespace(system='', user=none, field='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{%- set ns.system = message['content'] -%}"
    "{%- elif message['role'] == 'user' -%}{%- set ns.user = message['content'] -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if ns.user is none -%}"
    "{{- raise_exception('This model answers a user message, and the conversation has none.') -}}"
    "{%- endif -%}"
    "{%- if tools -%}"
    "{%- set function = tools[0]['function'] -%}"
    "{%- set schema = function['parameters'] or {} -%}"
    "{%- set ns.field = (schema['required'] or schema['properties'] or []) | list | first | default('', true) -%}"
    "{%- endif -%}"
    "{{- bos_token -}}"
    "{%- if messages[-1]['role'] == 'tool' -%}{{- 'Repeat the text:\\n' + messages[-1]['content'] -}}"
    "{%- elif ns.field -%}"
    "{{- 'Call the function:\\n' + function['name'] + ' ' + ns.field + '\\n' + ns.user -}}"
    "{%- else -%}{%- if ns.system -%}{{- ns.system + '\\n' -}}{%- endif -%}{{- ns.user -}}{%- endif -%}"
    "{%- if add_generation_prompt -%}{{- '<sep>' -}}{%- endif -%}"
)
"""Single-turn: the system message (the instruction), the last user message (the input), SEP.

Where a request has tools, the instruction is that of the task ``call``: the first function with its first required
parameter. The result of a tool is repeated.
"""


def byte_symbols() -> list[str]:
    """The printable characters that stand for the bytes 0..255 in a byte-level vocabulary, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in symbols)
    symbols.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [symbols[byte] for byte in range(256)]


def byte_level(
    tokens: Sequence[str], special: Sequence[str], merges: Sequence[tuple[str, str]], template: str
) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer that puts BOS before a plain prompt, ready for ``save_pretrained``.

    Args:
        tokens: The vocabulary in order of ids, special tokens included.
        merges: What makes one token of several, in order; text is divided into words first where there are any.
        template: The chat template.
    """
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges)))
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        sep_token=SEP,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer of the embedded model with its chat template."""
    return byte_level((*SPECIAL_TOKENS, *byte_symbols()), SPECIAL_TOKENS, (), CHAT_TEMPLATE)


def save_tokenizer(out: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, with the chat template inside the latter.

    Args:
        tokenizer: Another than the embedded model's.
    """
    (tokenizer or build_tokenizer()).save_pretrained(out, save_jinja_files=False)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release knows
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode_bytes(text: str) -> list[int]:
    """Token ids of a text without special tokens: the same as the tokenizer's, only faster."""
    return [BYTE_OFFSET + byte for byte in text.encode("utf-8")]
