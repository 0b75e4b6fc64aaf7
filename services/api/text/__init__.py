"""From text and messages to token ids."""
