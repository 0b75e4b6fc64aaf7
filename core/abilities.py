"""What a served model can do, and what a request that generates nothing gets of it."""

from __future__ import annotations

from dataclasses import dataclass

POOLINGS = ("", "last", "mean", "cls", "score")
"""What becomes of the hidden states of a prompt: that of its last token, their mean, that of its first token, or the
logits of the model's classifier. Empty for a request that generates tokens."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """
    Attributes:
        generates: Whether it continues a text: encoders do not.
        pooling: How its embeddings are made; empty if it makes none.
        dim: Numbers of an embedding.
        normalizes: Whether its embeddings are brought to length 1.
        num_labels: Outputs of its classifier, a model that reads two texts at once; 0 if it has none.
        squashes: Whether a score is brought into 0 to 1 by the logistic function.
    """

    generates: bool = True
    pooling: str = ""
    dim: int = 0
    normalizes: bool = True
    num_labels: int = 0
    squashes: bool = True

    @property
    def offers(self) -> str:
        """The endpoints for what it can do, as errors name them."""
        found = ["/v1/completions and /v1/chat/completions"] if self.generates else []
        if self.pooling:
            found.append("/v1/embeddings")
        if self.pooling or self.num_labels:
            found.append("/v1/score and /v1/rerank")
        return ", ".join(found)
