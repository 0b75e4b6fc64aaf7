"""Configuration: frozen dataclasses, read from TOML, overridden by flags; a wrong key or value is named."""
