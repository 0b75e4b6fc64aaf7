"""What layers may have in place of attention: a state of each sequence, which its tokens change in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A gated convolution over the last tokens, in place of attention (LFM2).

    Attributes:
        length: Tokens that an output reads, its own included; the state of a sequence is one less.
        channels: Values of a row that is convolved.
        bias: Whether its linear layers and the convolution have a bias.
    """

    length: int
    channels: int
    bias: bool = False

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return self.channels

    @property
    def state_size(self) -> int:
        """Values of a sequence's state."""
        return (self.length - 1) * self.channels

    @property
    def outputs(self) -> tuple[int, ...]:
        """Outputs of the layer's first matrix: the gate of the inputs, that of the outputs, and the inputs."""
        return (self.channels,) * 3

    @property
    def mixed(self) -> int:
        """Inputs of the layer's last matrix."""
        return self.channels


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The gated delta rule in place of attention (arXiv:2412.06464): a matrix a head, which each token changes.

    Attributes:
        length: Tokens that the convolution before it reads, the own one included.
        key_heads, value_heads: Heads; so many value heads in a row share a head of queries and keys.
        key, value: Values of a key and of a value.
        tiled: Whether value head i shares that of number i modulo ``key_heads``, as in GGUF files.
    """

    length: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    tiled: bool = False

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key + self.mixed

    @property
    def state_size(self) -> int:
        """Values of a sequence's state: rows of the convolution, then ``[value_heads, key, value]``."""
        return (self.length - 1) * self.convolved + self.value_heads * self.key * self.value

    @property
    def outputs(self) -> tuple[int, ...]:
        """Outputs of the layer's first matrix: what is convolved, gates of the values, strengths, decays."""
        return self.convolved, self.mixed, self.value_heads, self.value_heads

    @property
    def mixed(self) -> int:
        """Inputs of the layer's last matrix."""
        return self.value_heads * self.value


Mixer = ShortConvolution | DeltaNet
"""What a layer has in place of attention: a state of each sequence, in float32, that its tokens change in order."""
