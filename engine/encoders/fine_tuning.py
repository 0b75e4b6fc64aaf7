"""Trains Multi-Bin's regressor end to end (App. C.1): least absolute error, one linear layer on top of an encoder."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import Example
from farsight.core.processors import usable_processors
from farsight.engine.checkpoint.encoder_config import EncoderConfig
from farsight.engine.encoders.regressor import LengthRegressor, files_of, read_pairs
from farsight.engine.encoders.starts import begin_with_nothing, begin_with_weights
from farsight.engine.encoders.text_encoder import encoder_config, text_tokenizer, torch_device
from farsight.engine.models.encoder import EncoderModel, EncoderText
from farsight.predictor.artefact import TrainedModel
from farsight.predictor.features import Floats
from farsight.predictor.linear import NUM_BINS, BinnedLinear, fit_linear
from farsight.predictor.models import BERT, FULL, pack
from farsight.predictor.training import complete_ones

Progress = Callable[[int], None]
"""Called with the number of examples read so far, over all epochs."""

_HELD_BACK_EVERY = 5
"""One example in so many is not trained on: the outputs of these fill the bins, which are as wide as its errors."""

_LEAST_IN_A_BIN = 20

_WARM_UP = 0.1
"""Share of the updates over which the learning rate rises; then it falls to 0."""

_SMALL_HIDDEN = 256
"""Up to this width threads wait for each other longer than they compute: one thread trains."""

_WEIGHT_DECAY = 0.01
_MAX_NORM = 1.0
"""Longest gradient; a longer one is shortened to it."""


@dataclass(frozen=True, slots=True)
class FineTuning:
    """How a regressor is trained.

    Attributes:
        epochs: Passes over the examples.
        max_tokens: Tokens of a request that are read, its instruction's included; what is longer is cut off.
        batch_size: Requests of an update.
        learning_rate: Highest one; 0 takes 5e-5 for weights that were trained before and 1e-3 for new ones.
        seed: Random seed of new weights and of the order of the examples.

    Raises:
        InvalidValueError: a value out of range.
    """

    epochs: int = 3
    max_tokens: int = 256
    batch_size: int = 32
    learning_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("max_tokens", 8), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise InvalidValueError(name, getattr(self, name), f"an integer >= {least}")
        if not 0 <= self.learning_rate < 1:
            raise InvalidValueError("learning_rate", self.learning_rate, "at least 0 and below 1")


def fine_tune(
    examples: Sequence[Example],
    encoder: Path | None,
    options: FineTuning,
    *,
    device: str = "cpu",
    version: int = 1,
    progress: Progress | None = None,
) -> TrainedModel:
    """Trains a regressor and makes an artefact of it.

    Args:
        examples: Censored ones are left out.
        encoder: Directory of the encoder to begin with; None: a small one with random weights and a vocabulary of the
            examples' own words.
        version: Version of the artefact.

    Raises:
        InvalidValueError: too few examples, an encoder that cannot be loaded, or an unknown device.
    """
    complete = complete_ones(examples)
    held_back = complete[::_HELD_BACK_EVERY]
    trained_on = [each for number, each in enumerate(complete) if number % _HELD_BACK_EVERY]
    place = torch_device(device)
    with tempfile.TemporaryDirectory(prefix="farsight-regressor-") as name:
        folder = Path(name)
        if encoder is None:
            weights = begin_with_nothing(folder, [each.question for each in trained_on], options.seed)
        else:
            weights = begin_with_weights(folder, encoder, options.seed)
        config = encoder_config(folder)
        torch.set_num_threads(1 if config.hidden_size <= _SMALL_HIDDEN else usable_processors())
        rate = options.learning_rate or (1e-3 if encoder is None else 5e-5)
        _train(folder, config, weights, trained_on, options, rate, place, progress)
        # What is stored is what serves: the bins are those of the weights as they were rounded.
        save_file({name: _stored(tensor) for name, tensor in weights.items()}, folder / "model.safetensors")
        regressor = LengthRegressor.from_dir(folder, options.max_tokens, device)
        scores = regressor.scores([each.question for each in held_back])
        lens = np.array([each.output_len for each in held_back])
        arrays = {**files_of(folder), **pack(_bins(scores, lens), FULL)}
    metadata = {
        "version": version,
        "model": BERT,
        "num_examples": len(complete),
        "began_with": "nothing" if encoder is None else str(encoder),
        "max_tokens": options.max_tokens,
        "fine_tuning": asdict(options),
    }
    return TrainedModel(metadata, arrays)


def _train(
    folder: Path,
    config: EncoderConfig,
    weights: Mapping[str, Tensor],
    examples: Sequence[Example],
    options: FineTuning,
    learning_rate: float,
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Changes the weights in place."""
    moved = {name: tensor.to(device).requires_grad_() for name, tensor in weights.items()}
    texts = read_pairs(text_tokenizer(folder, config, options.max_tokens), [each.question for each in examples])
    targets = _scaled(examples).to(device)
    num_updates = options.epochs * math.ceil(len(texts) / options.batch_size)
    optimizer = torch.optim.AdamW(list(moved.values()), learning_rate, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: _rate(done / num_updates))
    rng = np.random.default_rng(options.seed)
    num_read = 0
    for _ in range(options.epochs):
        order = rng.permutation(len(texts))
        for begin in range(0, len(order), options.batch_size):
            rows = order[begin : begin + options.batch_size]
            loss = _loss(config, moved, [texts[i] for i in rows], targets[torch.from_numpy(rows)])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(list(moved.values()), _MAX_NORM)
            optimizer.step()
            schedule.step()
            num_read += len(rows)
            if progress is not None:
                progress(num_read)
    for name, tensor in weights.items():
        tensor.data.copy_(moved[name].detach())


def _bins(scores: Floats, output_lens: NDArray[np.int64]) -> BinnedLinear:
    """Scores to tokens, and what examples of like scores generated."""
    num_bins = max(1, min(NUM_BINS, len(scores) // _LEAST_IN_A_BIN))
    return fit_linear(scores[:, None], output_lens, num_bins)


def _loss(
    config: EncoderConfig, weights: Mapping[str, Tensor], texts: Sequence[EncoderText], targets: Tensor
) -> Tensor:
    # The model joins queries, keys and values as it is made, so it is made for each update, within the gradient.
    return (EncoderModel(config, weights).logits(texts)[:, 0] - targets).abs().mean()


def _scaled(examples: Sequence[Example]) -> Tensor:
    """Returns output lengths around their median, in units of their mean distance from it."""
    lens = np.array([each.output_len for each in examples], np.float64)
    around = lens - np.median(lens)
    return torch.from_numpy((around / max(1.0, float(np.abs(around).mean()))).astype(np.float32))


def _rate(done: float) -> float:
    """Returns the share of the highest learning rate after so much of the training."""
    return min(1.0, (done + 1e-3) / _WARM_UP) * min(1.0, max(0.0, (1 - done) / (1 - _WARM_UP)))


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float16).contiguous()
