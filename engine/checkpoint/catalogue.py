"""Published models that have a name here, and the directory where they lie."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farsight.core.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of ``catalogue.toml``, which explains the fields: one GGUF file."""

    name: str
    about: str
    file: str
    num_bytes: int
    sha256: str
    licence: str
    hub: str = ""
    wheels: Sequence[str] = ()

    @property
    def size(self) -> str:
        return f"{self.num_bytes / (1 << 20):,.0f} MiB"

    def is_in(self, directory: Path) -> bool:
        """Tells by the size alone whether the file is there; ``farsight pull`` compares the hash."""
        path = directory / self.file
        return os.path.isfile(path) and path.stat().st_size == self.num_bytes


@functools.cache
def catalogue() -> dict[str, PublishedModel]:
    """Returns the models by name."""
    listed = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text("utf-8"))
    return {name: PublishedModel(name=name, **fields) for name, fields in listed.items()}


def cache_dir() -> Path:
    """Returns the directory of what may be built or downloaded again; ``FARSIGHT_CACHE`` overrides it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FARSIGHT_CACHE") or Path(base) / "farsight")


def models_dir() -> Path:
    """Returns the directory of the catalogue's models: ``FARSIGHT_MODELS``, else ``models`` in that of caches."""
    return Path(os.environ.get("FARSIGHT_MODELS") or cache_dir() / "models").expanduser().absolute()


def pulled_file(model: PublishedModel) -> Path:
    """Returns the file of a model that has been pulled.

    Raises:
        InvalidValueError: It is not here; the message says how to get it.
    """
    directory = models_dir()
    if not model.is_in(directory):
        how = f"`farsight pull {model.name}` brings {model.file} ({model.size}) to {directory}"
        raise InvalidValueError("model", model.name, f"a model that is here; {how}")
    return directory / model.file
