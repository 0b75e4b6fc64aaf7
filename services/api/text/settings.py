"""What a configuration says about the texts of the served model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core.config.engine import ModelConfig
from core.errors import ConfigError, InvalidValueError
from tokenization.model_dir import read_text


@dataclass(frozen=True, slots=True)
class TextSettings:
    """
    Attributes:
        chat_template: File of the chat template; empty for the model's own.
        tool_format: Name of the form of tool calls; ``auto`` finds it from the template.
    """

    chat_template: str = ""
    tool_format: str = "auto"

    def template(self, own: str | None) -> str | None:
        """The chat template that is used.

        Args:
            own: The model's.

        Raises:
            ConfigError: The file cannot be read.
        """
        if not self.chat_template:
            return own
        try:
            return read_text(Path(self.chat_template))
        except (OSError, InvalidValueError) as error:
            expected = f"a file with a chat template ({error})"
            raise ConfigError("model.chat_template", self.chat_template, expected) from error


def text_settings(model: ModelConfig) -> TextSettings:
    return TextSettings(model.chat_template, model.tool_format)
