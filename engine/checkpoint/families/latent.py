"""The record of latent attention: one short row for each token in place of the keys and values of all heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    The row of a token is a part that is turned by position, the same for all heads, and the latent, of which each head
    makes a key and a value. To multiply a query with such a key is to bring the query into the latent's space, and to
    multiply it with the latent: so the row is the key of all heads, and its latent part their value.

    Attributes:
        q_rank: Values that the queries are made of; None: they are made of the layer's input.
        rank: Values of the latent.
        turned: Values of a head's query and key that are turned by position.
        plain: The others.
        value: Values of a head's value.
    """

    q_rank: int | None
    rank: int
    turned: int
    plain: int
    value: int

    @property
    def query(self) -> int:
        """Values of a head's query, as the checkpoint has it."""
        return self.plain + self.turned

    @property
    def width(self) -> int:
        """Values of the row that the KV pool holds of a token."""
        return self.rank + self.turned
