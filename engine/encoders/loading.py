"""Which code computes an encoder: our own, or the library sentence-transformers."""

from __future__ import annotations

from pathlib import Path

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.config_fields import UnsupportedModelError
from farsight.engine.checkpoint.encoder_config import check_encoder, load_encoder_config
from farsight.engine.encoders.finding import EXPECTED, encoder_dir, settled_name
from farsight.engine.encoders.library_encoder import LibraryEncoder, not_installed
from farsight.engine.encoders.text_encoder import TextEncoder
from farsight.predictor.encoders import LIBRARY, MINILM, Encoder
from farsight.tokenization.model_dir import model_file


def load_encoder(name: str, device: str = "cpu", found_at: str = "") -> Encoder:
    """Loads an encoder: by the library where the name says so, or where our own code does not compute its modules.

    Args:
        name: As ``[predictor] encoder`` has it.
        device: As in ``TextEncoder``.
        found_at: Where its files are now, if not where ``name`` says.

    Raises:
        InvalidValueError: Field ``encoder``: there is none of that name, or it cannot be loaded; ``device``: torch does
            not know it.
    """
    settled = settled_name(name)
    folder = encoder_dir(settled_name(found_at or settled))
    if settled.startswith(LIBRARY) or not _is_ours(folder):
        return LibraryEncoder(settled, folder, device)
    return TextEncoder(settled, device, folder=folder)


def locate_encoder(name: str) -> str:
    """Returns the name with an absolute path, after a look at the headers of its files; nothing is loaded.

    A hub id is in the hub's cache afterwards.

    Raises:
        InvalidValueError: As ``load_encoder``, as far as can be told without loading.
    """
    settled = settled_name(name)
    folder = encoder_dir(settled)
    by_library = settled.startswith(LIBRARY)
    if by_library or not _is_ours(folder):
        _check_library(name)
    else:
        _check_ours(folder)
    place = settled.removeprefix(LIBRARY)
    is_path = place != MINILM and Path(place).expanduser().is_dir()
    return (LIBRARY if by_library else "") + (str(folder.absolute()) if is_path else place)


def _is_ours(folder: Path) -> bool:
    """Returns whether our own code computes it; False only for what says that it is a model of the library."""
    try:
        return load_encoder_config(folder) is not None or model_file(folder, "modules.json") is None
    except UnsupportedModelError:
        return model_file(folder, "modules.json") is None


def _check_ours(folder: Path) -> None:
    try:
        config = load_encoder_config(folder)
        if config is None:
            raise InvalidValueError("config.json", str(folder), "the directory of an encoder")
        check_encoder(folder, config)
    except InvalidValueError as error:
        raise InvalidValueError("encoder", str(folder), f"{EXPECTED} ({error})") from error


def _check_library(name: str) -> None:
    from importlib.util import find_spec

    if find_spec("sentence_transformers") is None:
        raise not_installed(name)
