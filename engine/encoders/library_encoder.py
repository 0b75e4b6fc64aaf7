"""Encoders that the library sentence-transformers computes, whatever their modules are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from farsight.core.errors import InvalidValueError
from farsight.core.processors import usable_processors
from farsight.engine.encoders.text_encoder import torch_device
from farsight.predictor.features import Floats


def not_installed(name: str) -> InvalidValueError:
    """Makes the error of an encoder that the library would compute."""
    extra = "pip install 'farsight[encoders]', 70 MB beside torch"
    return InvalidValueError("encoder", name, f"sentence-transformers, which is not installed ({extra})")


class LibraryEncoder:
    """A model of sentence-transformers: the library itself tokenises, pools, and computes the layers behind.

    Args:
        name: As the configuration has it.
        folder: Holds the model's files; nothing is fetched, and no code of theirs is run.
        device: As in ``TextEncoder``.
        batch_size: Texts in one forward pass.

    Raises:
        InvalidValueError: Field ``encoder``: the library is not installed, or cannot load the model; ``device``: torch
            does not know it.
    """

    def __init__(self, name: str, folder: Path, device: str = "cpu", batch_size: int = 32) -> None:
        try:
            import sentence_transformers  # takes seconds, which only this kind of encoder is worth
        except ImportError as error:
            raise not_installed(name) from error
        place = str(torch_device(device))
        torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
        self.name = name
        self._batch_size = batch_size
        try:
            self._model = sentence_transformers.SentenceTransformer(str(folder), device=place, local_files_only=True)
            self.dim = int(self._encoded(["a"]).shape[1])
        except Exception as error:  # the library raises errors of several others
            reason = str(error).strip().partition("\n")[0]
            expected = f"a model of sentence-transformers; it could not be loaded: {reason}"
            raise InvalidValueError("encoder", str(folder), expected) from error

    def encode(self, texts: Sequence[str]) -> Floats:
        """Encodes texts, ``(texts, dim)``; what is beyond the model's context is cut off."""
        return self._encoded(texts) if texts else np.empty((0, self.dim), np.float32)

    def _encoded(self, texts: Sequence[str]) -> Floats:
        vectors = self._model.encode(list(texts), batch_size=self._batch_size, show_progress_bar=False)
        return np.asarray(vectors, np.float32)
