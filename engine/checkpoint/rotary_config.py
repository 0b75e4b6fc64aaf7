"""How positions turn queries and keys: the rotary fields of a ``config.json``.

transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one ``rope_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farsight.engine.checkpoint.config_fields import Fields, UnsupportedModelError

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_FIELDS = {
    "default": _COMMON,
    "linear": _COMMON | {"factor"},
    "dynamic": _COMMON | {"factor", "original_max_position_embeddings"},
    "yarn": _COMMON
    | {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"}
    | {"original_max_position_embeddings"},
    "proportional": _COMMON | {"factor"},
    "llama3": _COMMON | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "longrope": _COMMON
    | {"factor", "short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"},
}
"""Fields that each kind is computed from; any other field is refused as unknown."""

_LONGROPE_ALIASES = ("su", "yarn")
"""Older names of longrope in Phi-3 checkpoints, as transformers reads them; elsewhere ``yarn`` is a kind of its own."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by ``factor``, high ones left alone, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each frequency is divided by a factor of its own: what a GGUF file holds in place of Llama 3's parameters."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The first ``turned`` frequencies of a whole head are divided by ``factor``; the others turn nothing (Gemma 4)."""

    factor: float
    turned: int


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base of the frequencies grows with the context that is served, from ``original_len`` tokens on.

    transformers lets it grow with each sequence, whose earlier keys keep the frequencies of their time. Here all
    sequences of a server have those of the longest one that it serves.
    """

    factor: float
    original_len: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """High frequencies are left alone, low ones divided by ``factor``, with a ramp between two numbers of turns.

    Attributes:
        beta_fast, beta_slow: Turns within ``original_len`` tokens where the ramp begins and ends.
        truncate: Whether the ends of the ramp are whole numbers of frequencies.
        attention_factor: Factor of the tables.
    """

    factor: float
    original_len: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Each frequency is divided by a factor of its own, and the tables multiplied with ``attention_factor``.

    A server of at most ``original_len`` tokens divides by the short factors, any other by the long ones: a sequence
    that grew from one to the other would need all of its keys again. With ``by_request`` it has tables of both, and
    each request has its own for its whole life.
    """

    short_factors: tuple[float, ...]
    attention_factor: float
    original_len: int
    long_factors: tuple[float, ...] = ()
    by_request: bool = False


Scaling = (
    LinearScaling | ProportionalScaling | DynamicScaling | YarnScaling | Llama3Scaling | FactorScaling | LongScaling
)


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """The rotary embedding; its tables are made by ``engine.models.rotary``.

    Attributes:
        rotary_dim: Even number of values of a head, from its first, that are rotated, their halves against each other.
        theta: Base of the frequencies.
        scaling: How the frequencies are changed.
        axes: For each frequency, which axis of a position turns it: 0 time, 1 row, 2 column. None where positions have
            one axis. Tokens of text have the same position on all of them.
    """

    rotary_dim: int
    theta: float
    scaling: Scaling | None = None
    axes: tuple[int, ...] | None = None

    @property
    def stretched_len(self) -> int:
        """The longest sequence that the scaling stretches the context to, in tokens; 0 where it says nothing of it."""
        if isinstance(self.scaling, (DynamicScaling, YarnScaling)):
            return int(self.scaling.factor * self.scaling.original_len)
        return 0

    def long_row(self, max_len: int) -> int:
        """Returns the row at which the tables of the long factors begin; 0 if there is one table for all sequences.

        Args:
            max_len: Longest sequence that is served, in tokens.
        """
        scaling = self.scaling
        both = isinstance(scaling, LongScaling) and scaling.by_request and max_len > scaling.original_len
        return max_len if both else 0


def read_rotary(config: Fields, head_dim: int, kinds: Sequence[str], *, partial: bool) -> RotaryConfig:
    """The rotary embedding that a configuration describes.

    Args:
        config: The whole configuration.
        kinds: The ``rope_type`` values that are computed for its architecture.
        partial: Whether the architecture can leave a part of each head unrotated.

    Raises:
        UnsupportedModelError: a kind or a field that is not computed.
    """
    rope = _rope_fields(config)
    kind = rope["rope_type"] or rope["type"] or "default"
    if kind in _LONGROPE_ALIASES and "longrope" in kinds and kind not in kinds:
        kind = "longrope"
    if kind not in kinds:
        raise UnsupportedModelError(rope.path("rope_type"), kind, f"one of {', '.join(kinds)}")
    for name in rope.given():
        if name not in _FIELDS[kind]:
            raise rope.error(name, f"nothing (unknown for rope_type {kind!r})")
    rotary_dim = _rotary_dim(config, rope, head_dim, partial=partial or kind == "proportional")
    scaling = _scaling(kind, config, rope, rotary_dim)
    if isinstance(scaling, ProportionalScaling):  # its share is of the frequencies, which are those of the whole head
        rotary_dim = head_dim
    holder = _holder(config, rope, "rope_theta")
    theta = holder.positive("rope_theta")
    if kind == "yarn" and theta <= 1:
        raise holder.error("rope_theta", "a number > 1 for rope_type yarn")
    return RotaryConfig(rotary_dim, theta, scaling)


def _rope_fields(config: Fields) -> Fields:
    """The nested object, whatever its name."""
    old, new = config["rope_scaling"] or {}, config["rope_parameters"] or {}
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, dict):
            raise config.error(name, "an object")
    if old and new and old != new:
        raise config.error("rope_scaling", "nothing beside another rope_parameters")
    return Fields(old or new, {}, "rope_scaling." if old else "rope_parameters.")


def _holder(config: Fields, rope: Fields, name: str) -> Fields:
    """Where a field stands that may be in the nested object or beside it; the nested one wins, as in transformers."""
    return config if rope[name] is None else rope


def _rotary_dim(config: Fields, rope: Fields, head_dim: int, *, partial: bool) -> int:
    fields = _holder(config, rope, "partial_rotary_factor")
    share = fields.positive("partial_rotary_factor")
    if share > 1 or (share != 1 and not partial):
        raise fields.error("partial_rotary_factor", "a number <= 1" if partial else "1.0")
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not rotary_dim:
        raise UnsupportedModelError("head_dim", head_dim, "an even number of values to turn (they are turned in pairs)")
    return rotary_dim


def _scaling(kind: str, config: Fields, rope: Fields, rotary_dim: int) -> Scaling | None:
    if kind == "linear":
        return LinearScaling(rope.positive("factor"))
    if kind == "proportional":
        return ProportionalScaling(1.0 if rope["factor"] is None else rope.positive("factor"), rotary_dim // 2)
    if kind == "dynamic":
        if rotary_dim == 2:
            raise UnsupportedModelError("head_dim", rotary_dim, "more than 2 values to turn, for rope_type dynamic")
        return DynamicScaling(rope.positive("factor"), _original_len(config, rope))
    if kind == "yarn":
        return _yarn(config, rope)
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if low >= high:
            raise rope.error("low_freq_factor", f"a number < high_freq_factor ({high})")
        return Llama3Scaling(rope.positive("factor"), low, high, _original_len(config, rope))
    if kind == "longrope":
        long, short = (rope.positives(name, rotary_dim // 2) for name in ("long_factor", "short_factor"))
        original_len = _original_len(config, rope)
        return LongScaling(short, _attention_factor(config, rope, original_len), original_len, long)
    return None


def _yarn(config: Fields, rope: Fields) -> YarnScaling:
    def given(name: str, otherwise: float) -> float:
        return otherwise if rope[name] is None else rope.positive(name)

    original_len = _original_len(config, rope)
    factor = given("factor", config.size("max_position_embeddings") / original_len)

    def stretch(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    own = stretch(1.0)
    if rope["mscale"] and rope["mscale_all_dim"]:
        own = stretch(rope.positive("mscale")) / stretch(rope.positive("mscale_all_dim"))
    truncate = rope["truncate"] is None or rope.flag("truncate")
    fast, slow = given("beta_fast", 32.0), given("beta_slow", 1.0)
    if fast < slow:
        raise rope.error("beta_fast", f"a number >= beta_slow ({slow})")
    return YarnScaling(factor, original_len, fast, slow, truncate, given("attention_factor", own))


def _original_len(config: Fields, rope: Fields) -> int:
    """Context of the pretraining; the field beside the nested object wins, as in transformers."""
    for fields in (config, rope):
        if fields["original_max_position_embeddings"] is not None:
            return fields.size("original_max_position_embeddings")
    return config.size("max_position_embeddings")


def _attention_factor(config: Fields, rope: Fields, original_len: int) -> float:
    if rope["attention_factor"] is not None:
        return rope.positive("attention_factor")
    factor = config.size("max_position_embeddings") / original_len
    if rope["factor"] is not None:
        factor = rope.positive("factor")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_len))
