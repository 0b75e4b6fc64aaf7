"""The abilities of a served model, and the results of requests that generate nothing."""

from __future__ import annotations

from dataclasses import dataclass

POOLINGS = ("", "last", "mean", "cls", "score")
"""Results from the hidden states of a prompt: the last token's state, the mean, the first token's state, or the logits
of the model's classifier. Empty for a request that generates tokens."""


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
        score_ids: Tokens by which a decoder scores two texts: the logit of the first one less that of the second.
        instruction: What such a decoder is told before the two texts; empty for nothing.
        begins_turn: Whether its prompt ends with the beginning of an answer.
    """

    generates: bool = True
    pooling: str = ""
    dim: int = 0
    normalizes: bool = True
    num_labels: int = 0
    squashes: bool = True
    score_ids: tuple[int, ...] = ()
    instruction: str = ""
    begins_turn: bool = False

    @property
    def offers(self) -> str:
        """The endpoints that the model can serve, as errors name them."""
        found = ["/v1/completions and /v1/chat/completions"] if self.generates else []
        if self.pooling:
            found.append("/v1/embeddings")
        if self.pooling or self.num_labels:
            found.append("/v1/score and /v1/rerank")
        return ", ".join(found)
