"""An encoder's directory as the length predictor uses it: texts in, vectors out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from farsight.core.errors import InvalidValueError
from farsight.core.processors import usable_processors
from farsight.engine.checkpoint.config_fields import Fields, read_json
from farsight.engine.checkpoint.encoder_config import EncoderConfig, load_encoder_config
from farsight.engine.encoders.finding import EXPECTED, encoder_dir
from farsight.engine.models.encoder import EncoderModel, EncoderText
from farsight.predictor.features import Floats
from farsight.tokenization.loading import load_tokenizer


class TextEncoder:
    """An encoder with its tokenizer; it makes the vectors of sentence-transformers.

    Args:
        name: A hub id, a directory or ``minilm``.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU if there is one.
        batch_size: Texts in one forward pass.
        folder: Where its files are, if not where ``name`` says.

    Raises:
        InvalidValueError: Field ``encoder``: the model cannot be loaded; ``device``: torch does not know it.
    """

    def __init__(self, name: str, device: str = "cpu", batch_size: int = 32, folder: Path | None = None) -> None:
        self.name = name
        place = torch_device(device)
        # Libraries count the processors of the affinity mask, but not those of a quota.
        torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
        folder = encoder_dir(self.name) if folder is None else folder
        try:
            self._config = encoder_config(folder)
            self._model = EncoderModel.from_dir(folder, self._config, torch.float32).to(place)
            self._tokenizer = text_tokenizer(folder, self._config)
        except InvalidValueError as error:
            raise InvalidValueError("encoder", str(folder), f"{EXPECTED}; it could not be loaded: {error}") from error
        self._batch_size = batch_size
        self.dim = self._model.embeddings([EncoderText((0,))]).shape[1]

    def encode(self, texts: Sequence[str]) -> Floats:
        """Encodes texts, ``(texts, dim)``; what is beyond the model's context is cut off. One forward pass a batch."""
        vectors = [self._encoded(texts[i : i + self._batch_size]) for i in range(0, len(texts), self._batch_size)]
        return np.concatenate(vectors) if vectors else np.empty((0, self.dim), np.float32)

    def _encoded(self, texts: Sequence[str]) -> Floats:
        read = [EncoderText(each.ids) for each in self._tokenizer.encode_batch(list(texts))]
        vectors = self._model.embeddings(read)
        if self._config.sentence.normalizes:
            vectors = F.normalize(vectors)
        return vectors.cpu().numpy()


def encoder_config(folder: Path) -> EncoderConfig:
    """
    Raises:
        InvalidValueError: The directory holds another kind of model, or a file of it cannot be read.
    """
    config = load_encoder_config(folder)
    if config is None:
        raise InvalidValueError("config.json: architectures", str(folder), "one of BERT, RoBERTa or XLM-RoBERTa")
    return config


def text_tokenizer(folder: Path, config: EncoderConfig, max_tokens: int = 0) -> Tokenizer:
    """Loads a tokenizer; it cuts texts off where the model or ``sentence_bert_config.json`` ends them.

    Args:
        max_tokens: Most tokens of a text, if fewer than the model takes; 0: what the model takes.
    """
    tokenizer = load_tokenizer(folder)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= config.vocab_size:
        raise InvalidValueError("tokenizer.json", highest, f"token ids below the model's {config.vocab_size}")
    told = Fields(read_json(folder, "sentence_bert_config.json") or {}, {"max_seq_length": config.max_len})
    longest = min(config.max_len, told.size("max_seq_length"), max_tokens or config.max_len)
    tokenizer.enable_truncation(longest)
    return tokenizer


def torch_device(device: str) -> torch.device:
    """
    Raises:
        InvalidValueError: Field ``device``: torch does not know it, or there is no such GPU.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # torch raises several types, by build and device
        raise InvalidValueError("device", device, "auto, cpu, or a GPU of this machine as cuda or cuda:0") from error
