"""Multi-Bin's regressor (App. C.1): an encoder with one linear layer on top, trained end to end, in an artefact.

``text_model_of`` is the one way to what an artefact needs in order to read texts, for the server and the commands.

The artefact holds the files of a directory that any encoder could have: configuration, tokenizer and safetensors. They
are loaded the way a directory is, so nothing in an artefact is trusted more than a directory would be.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import ForecastQuestion
from farsight.core.processors import usable_processors
from farsight.engine.encoders.loading import load_encoder
from farsight.engine.encoders.text_encoder import encoder_config, text_tokenizer, torch_device
from farsight.engine.models.encoder import EncoderModel, EncoderText
from farsight.predictor.artefact import ArtefactError, TrainedModel
from farsight.predictor.encoders import Encoder, Scorer, check_probe
from farsight.predictor.features import Floats
from farsight.predictor.models import BERT
from farsight.predictor.text_predictor import encoder_of

FILES = ("config.json", "tokenizer.json", "model.safetensors")
"""Files of the encoder; each is an array ``encoder.FILE`` of bytes."""

BATCH = 32
"""Texts of one forward pass."""


class LengthRegressor:
    """A fine-tuned encoder: a text's score is linear in its predicted output length.

    Args:
        model: With a classifier of one output.
        tokenizer: Cuts a text off where the training did.
    """

    def __init__(self, model: EncoderModel, tokenizer: Tokenizer) -> None:
        if model.config.num_labels != 1:
            raise InvalidValueError("num_labels", model.config.num_labels, "1, the output length")
        self.model = model
        self._tokenizer = tokenizer

    @classmethod
    def from_dir(cls, folder: Path, max_tokens: int, device: str = "cpu") -> LengthRegressor:
        """
        Args:
            max_tokens: Tokens of a text that are read.

        Raises:
            InvalidValueError: A file is missing, damaged, or not of such a model; ``device``: torch does not know it.
        """
        config = encoder_config(folder)
        model = EncoderModel.from_dir(folder, config, torch.float32).to(torch_device(device))
        return cls(model, text_tokenizer(folder, config, max_tokens))

    def scores(self, questions: Sequence[ForecastQuestion]) -> Floats:
        """Returns one score a question, float32."""
        texts = read_pairs(self._tokenizer, questions)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].token_ids))
        found = np.empty(len(texts), np.float32)
        for begin in range(0, len(order), BATCH):
            rows = order[begin : begin + BATCH]
            found[rows] = self.model.scores([texts[i] for i in rows])[:, 0].cpu().numpy()
        return found


def read_pairs(tokenizer: Tokenizer, questions: Sequence[ForecastQuestion]) -> list[EncoderText]:
    """Returns token ids of instruction and user input, read as a pair of texts."""
    pairs = [(each.instruction, each.user_input) for each in questions]
    return [_text(each.ids, each.type_ids) for each in tokenizer.encode_batch(pairs)]


def _text(ids: list[int], types: list[int]) -> EncoderText:
    return EncoderText(ids, types.index(1) if 1 in types else 0)


def regressor_of(artefact: TrainedModel, device: str = "cpu") -> LengthRegressor:
    """Returns the regressor in an artefact of ``farsight train --kind bert``.

    Raises:
        ArtefactError: A file of it is missing, damaged, or not of such a model.
        InvalidValueError: Field ``device``: torch does not know it.
    """
    torch_device(device)
    torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
    with tempfile.TemporaryDirectory(prefix="farsight-regressor-") as name:
        folder = Path(name)
        try:
            for file in FILES:
                (folder / file).write_bytes(_bytes(artefact.arrays[_array(file)]))
            return LengthRegressor.from_dir(folder, int(artefact.metadata["max_tokens"]), device)
        except (KeyError, TypeError, ValueError, InvalidValueError) as error:
            raise ArtefactError(f"the artefact holds no regressor ({error}); train it again") from error


def files_of(folder: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an artefact that hold a regressor's directory."""
    return {_array(file): np.frombuffer((folder / file).read_bytes(), np.uint8) for file in FILES}


def _bytes(array: NDArray[Any]) -> bytes:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"an array of bytes instead of {array.dtype} {array.shape}")
    return array.tobytes()


def _array(file: str) -> str:
    return f"encoder.{file}"


def text_model_of(artefact: TrainedModel, encoder: str = "", device: str = "cpu") -> Encoder | Scorer | None:
    """Returns the encoder or the regressor of an artefact; None where it reads words or lengths alone.

    Args:
        encoder: Where the encoder of its training lies now, if not where it lay then.

    Raises:
        ArtefactError: As ``regressor_of``.
        InvalidValueError: Field ``encoder``: it cannot be loaded, or is another one than that of the training;
            ``device``: torch does not know it.
    """
    if artefact.metadata.get("model") == BERT:
        return regressor_of(artefact, device)
    name = encoder_of(artefact)
    if name is None:
        return None
    loaded = load_encoder(name, device, found_at=encoder)
    check_probe(artefact, loaded)
    return loaded
