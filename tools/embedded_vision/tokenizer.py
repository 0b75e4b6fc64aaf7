"""The embedded vision model's tokenizer: that of the embedded model, with an image in place of a reserved token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tools.embedded_model.tokenizer import save_tokenizer

IMAGE: Final = "<image>"
IMAGE_ID: Final = 4

CHAT_TEMPLATE: Final = (
    "{%- set ns = namespace(user=none) -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{%- set ns.user = message['content'] -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if ns.user is none -%}"
    "{{- raise_exception('This model answers a user message, and the conversation has none.') -}}"
    "{%- endif -%}"
    "{{- bos_token -}}"
    "{%- if ns.user is string -%}{{- ns.user -}}"
    "{%- else -%}"
    "{%- for part in ns.user -%}{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}"
    "{%- for part in ns.user -%}{%- if part['type'] == 'image' -%}{{- '<image>' -}}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}"
    "{%- if add_generation_prompt -%}{{- '<sep>' -}}{%- endif -%}"
)
"""Single-turn: the text of the last user message, its images, SEP."""


def save_vision_tokenizer(out: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    save_tokenizer(out)
    path = out / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("<reserved_0>", IMAGE), encoding="utf-8")
    settings = out / "tokenizer_config.json"
    config = json.loads(settings.read_text(encoding="utf-8")) | {"chat_template": CHAT_TEMPLATE}
    settings.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
