"""What an artefact needs in order to read texts: the one way to it, for the server and the commands."""

from __future__ import annotations

from engine.encoders.finding import encoder_dir, settled_name
from engine.encoders.regressor import regressor_of
from engine.encoders.text_encoder import TextEncoder
from predictor.artefact import TrainedModel
from predictor.encoders import Encoder, Scorer, check_probe
from predictor.models import BERT
from predictor.text_predictor import encoder_of


def text_model_of(artefact: TrainedModel, encoder: str = "", device: str = "cpu") -> Encoder | Scorer | None:
    """The encoder or the regressor of an artefact; None where it reads words or lengths alone.

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
    loaded = TextEncoder(name, device, folder=encoder_dir(settled_name(encoder)) if encoder else None)
    check_probe(artefact, loaded)
    return loaded
