"""The record that describes a family of models: what its configuration says, and which blocks its layers are made of.

A family is data. ``engine.checkpoint.model_config`` reads a ``config.json`` by it, ``engine.checkpoint.weights`` finds
the tensors by it, and both the torch operations and the compiled step compute what its ``Blocks`` say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.checkpoint.families.mixers import Mixer
from farsight.engine.checkpoint.rotary_config import RotaryConfig


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of which each token takes a few. A router scores all of them, linearly, from the MLP's input.

    To choose the largest values of a softmax and to normalise them is the same as a softmax of the largest logits, so
    families of both orders have one record.

    Attributes:
        count: Experts of a layer.
        active: Experts that each token takes.
        inner: Width of one expert.
        layers: By layer: whether it has experts; the others have a plain MLP.
        scores: What makes a weight of a logit.
        normalized: Whether the weights of a token's experts are divided by their sum.
        scale: Factor of the weights.
        shared_inner: Width of the experts that every token takes, as one MLP; 0 without.
        groups, active_groups: Experts lie in so many groups of one size; a token takes experts of so many of them, of
            those whose ``group_best`` best scores have the largest sums.
        correction: Whether a learned number is added to each score, for the choice alone.
        beside: Whether they compute beside a plain MLP, and each of the two has norms of its own (Gemma 4).
        router_bias: Whether the router adds a bias.
        shared_gate: Whether what they give is multiplied by a sigmoid of a linear function of the input.
    """

    count: int
    active: int
    inner: int
    layers: tuple[bool, ...]
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    shared_inner: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    groups: int = 1
    active_groups: int = 1
    group_best: int = 1
    correction: bool = False
    beside: bool = False

    @property
    def router_rows(self) -> int:
        """Outputs of the router, the gate of the shared experts among them."""
        return self.count + self.shared_gate


def chosen_experts(config: Fields, count: str, active: str) -> tuple[int, int]:
    """How many experts there are and how many a token takes, by the names of the two fields.

    Raises:
        UnsupportedModelError: No such sizes, or more active experts than there are.
    """
    experts = config.size(count, 1 << 16)
    taken = config.size(active)
    if taken > experts:
        raise config.error(active, f"at most the {experts} experts")
    return experts, taken


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


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of one layer, and where its keys and values are.

    Attributes:
        inner: Width of its MLP.
        kv_of: Number of the earlier layer whose keys and values it reads; None: it has its own.
        one_key: Whether keys and values are made by the same weights.
        mixer: What it has in place of attention.
    """

    head_dim: int
    kv_heads: int
    inner: int
    kv_of: int | None = None
    one_key: bool = False
    mixer: Mixer | None = None

    @property
    def keeps_kv(self) -> bool:
        """Whether the KV pool holds keys and values of this layer."""
        return self.mixer is None and self.kv_of is None


Windows = tuple[int | None, ...]
"""By layer: the number of tokens that a token attends to, itself included; None for all."""

ACTIVATIONS: Mapping[str, Literal["silu", "relu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""By their names in a ``config.json``: the functions that are computed."""

PLAIN_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linear layers add a bias; ``head`` is the vocabulary head."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """A gated activation whose halves are cut: ``(up + 1) * gate * sigmoid(alpha * gate)``, as in gpt-oss.

    Attributes:
        alpha: Factor within the sigmoid.
        limit: The gate is at most this; ``up`` lies between it and its negative.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class QueryScale:
    """The query at position ``p`` is multiplied with ``1 + beta * log(1 + floor(p / length))``, as in Ministral 3."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a layer, the embedding and the head are put together.

    Attributes:
        gated: The MLP is ``down(act(gate) * up)``; otherwise ``down(act(up))``.
        parallel: Attention and MLP both read the layer's input; otherwise the MLP reads what attention has added to.
        one_norm: In a parallel layer, both read the same norm of it.
        norm_before: Whether attention and MLP read a norm of the residual stream, or the stream itself.
        norm_after: Whether what they add goes through a norm.
        norm_bias: Whether a LayerNorm has a bias.
        norm_offset: What is added to the stored weights of RMS norms, which are then kept in float32; None: nothing,
            and they are kept in the model's type.
        head_norm: RMS norm of queries and keys before they are turned: of ``each`` head with the same weight, or of
            ``all`` heads as one row.
        embedding_scale: Factor of the embeddings, rounded to the model's type.
        embedding_norm: Whether they go through a norm.
        residual_scale: Factor of what attention and MLP add.
        value_norm: Whether each value has the RMS norm of 1, without a weight.
        attention_gate: Whether what attention gives is multiplied by a sigmoid of more outputs of the queries' matrix.
        query_scale: What queries are multiplied with by their position.
        layer_inputs: Values that each layer gets of each token beside the residual stream (Gemma 4); 0: none.
        layer_scale: Whether a layer multiplies the stream with a number of its own at its end.
        attention_scale: Factor of the products of queries and keys; None: one over the root of ``head_dim``.
        attention_cap: The scaled products ``s`` become ``cap * tanh(s / cap)``.
        alibi: Products also get a slope of their head times the key's position.
        logit_scale, logit_cap: The same two for the logits.
        unit_head: The rows of the vocabulary head are brought to length 1.
        sinks: Each head has a learned score that takes part in the softmax and has no value.
        clamp: Takes the place of the activation of a gated MLP; None: nothing is cut.
    """

    gated: bool = True
    parallel: bool = False
    one_norm: bool = False
    norm_before: bool = True
    norm_after: bool = False
    norm_bias: bool = True
    norm_offset: float | None = None
    head_norm: Literal["each", "all"] | None = None
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    residual_scale: float = 1.0
    value_norm: bool = False
    attention_gate: bool = False
    query_scale: QueryScale | None = None
    layer_inputs: int = 0
    layer_scale: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    alibi: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None
    unit_head: bool = False
    sinks: bool = False
    clamp: ClampedGate | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A checkpoint's names of its tensors, and how their rows lie. Llama's by default.

    Attributes:
        positions: Learned positions; the first ``unused_positions`` rows belong to none.
        layers: Prefix of the layers; names of a layer's tensors follow behind ``layers.N.``.
        qkv: One tensor each, or a single one.
        up: Gate and up, or a single one.
        router: Scores the experts of a layer that has them.
        correction: What is added to their scores; ``correction_rows``: as a matrix of one row.
        expert_up, expert_down: As ``up`` and ``down``, for expert ``{}``; a name without a number holds all experts.
        sinks: The sinks of a layer's heads, where it has them.
        expert_ends: What follows the names of the experts' weights and biases.
        expert_transposed: Tensors that hold all experts lie as ``[experts, inputs, outputs]``.
        expert_pairs: Their rows of gate and up alternate.
        shared_up, shared_down, shared_gate: The same for the experts that every token takes.
        aliases: Other names that checkpoints have for tensors of the whole model.
        renamed: Beginnings of names of checkpoints that hold more than this model, and what they are here.
        elsewhere: Beginnings of names of what else they hold.
        ignored: Ends of names that carry nothing.
        transposed: Matrices of the layers lie as ``[inputs, outputs]``.
        grouped: The rows of ``qkv`` are, for each KV head, its queries, its key and its value.
        interleaved: The values of a head that are turned together lie beside each other, and not half a head apart.
        q_up, kv_up: With latent attention: what makes queries of their latent, and keys and values of the other one.
        mixer: Prefix of what a layer has in place of attention; ``mixer_in``, ``mixer_out``: its first matrix, in
            parts, and its last one; ``mixer_conv``: its convolution; ``mixer_grouped``: the first lies by key head.
        rates, steps, mixer_norm: What the delta rule has; ``rates_ready``: rates are stored ready for use.
        all_inputs: What gives every layer inputs of its own: embedding, projection of the others, and its norm.
        inputs: What a layer makes of them: gate, projection, and norm.
        layer_scale: The number that a layer multiplies the stream with.
        beside: What experts beside an MLP have: scales of the router's input and of each expert; norms before them,
            behind the MLP, and behind them.
        further_layers: Checkpoints have layers behind the last one, which guess further tokens; they are not read.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    positions: str = ""
    unused_positions: int = 0
    layers: str = "model.layers"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    after_attention: str = "post_attention_layernorm"
    post_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    after_mlp: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_rows: bool = False
    expert_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    sinks: str = "self_attn.sinks"
    expert_ends: tuple[str, str] = (".weight", ".bias")
    expert_transposed: bool = False
    expert_pairs: bool = False
    shared_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    aliases: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    transposed: bool = False
    grouped: bool = False
    interleaved: bool = False
    q_up: str = "self_attn.q_b_proj"
    kv_up: str = "self_attn.kv_b_proj"
    mixer: str = "linear_attn"
    mixer_in: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    mixer_out: str = "out_proj"
    mixer_conv: str = "conv1d"
    mixer_grouped: bool = False
    rates: str = "A_log"
    rates_ready: bool = False
    steps: str = "dt_bias"
    mixer_norm: str = "norm.weight"
    all_inputs: tuple[str, str, str] = (
        "model.embed_tokens_per_layer",
        "model.per_layer_model_projection",
        "model.per_layer_projection_norm",
    )
    inputs: tuple[str, str, str] = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
    layer_scale: str = "layer_scalar"
    beside: tuple[str, str, str, str, str] = (
        "router.scale",
        "router.per_expert_scale",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
    )
    further_layers: bool = False

    def of_mixer(self, part: str) -> str:
        """Returns the name in a layer of a part of what it has in place of attention."""
        return f"{self.mixer}.{part}" if self.mixer else part

    @property
    def in_order(self) -> bool:
        """Whether all rows lie as they are computed with."""
        return not (self.transposed or self.grouped or self.interleaved)

    def layer(self, index: int) -> str:
        """Returns the prefix of the names of a layer's tensors."""
        return f"{self.layers}.{index}."


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a family's outputs have been compared with.

    Attributes:
        models: Published models of the family.
        reference: What computes the same in the test of families, token for token.
        test: Where that test is, under ``tests/unit/engine``.
        verified: False where the reference was written from a description, and no published checkpoint was compared.
        date: When the comparison was last extended.
    """

    models: str
    reference: str = "transformers"
    verified: bool = True
    test: str = "families/test_families.py"
    date: str = "2026-11-23"


NEW = "2026-11-29"
"""When the families of 2026 were compared."""

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Every ``rope_type`` that is computed."""

T = TypeVar("T")
Rotaries = Callable[[Fields, int, Windows], tuple[RotaryConfig | None, ...]]
"""The rotary embedding of each layer, by head_dim and windows."""


def full_attention(config: Fields, num_layers: int) -> Windows:
    """No window anywhere."""
    return (None,) * num_layers


def nothing_derived(config: Fields) -> Mapping[str, Any]:
    """Derives nothing: the configuration says everything by itself."""
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family.

    Attributes:
        defaults: Defaults of the fields of its ``config.json``, as in transformers.
        evidence: What it has been compared with.
        fixed: Fields for which the engine computes only one value. A missing field or null is fine.
        spelled: Our names of fields that it names differently.
        derived: Fields, by our names, that follow from others.
        norm: Kind of the norms.
        activations: The values of ``hidden_act`` that it may have.
        blocks, biases, names: Values, or functions of the configuration.
        rope_kinds: The ``rope_type`` values that are computed; none: positions are not turned.
        partial_rotary: Whether a part of each head can stay unrotated.
        rotaries: The rotary embedding by layer, where layers differ.
        experts: Its mixture of experts, by the configuration and the number of layers.
        latent: Its latent attention; ``derived`` then says what the KV pool sees of it.
        shapes: The shape of each layer, where layers differ.
    """

    defaults: Mapping[str, Any]
    evidence: Evidence
    fixed: Mapping[str, Any] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Fields], Mapping[str, Any]] = nothing_derived
    norm: Literal["rms", "layer"] = "rms"
    activations: tuple[str, ...] = ("silu",)
    blocks: Blocks | Callable[[Fields], Blocks] = field(default_factory=Blocks)
    biases: Biases | Callable[[Fields], Biases] = field(default_factory=Biases)
    names: TensorNames | Callable[[Fields], TensorNames] = field(default_factory=TensorNames)
    windows: Callable[[Fields, int], Windows] = full_attention
    rope_kinds: tuple[str, ...] = ROPE_KINDS
    partial_rotary: bool = False
    rotaries: Rotaries | None = None
    experts: Callable[[Fields, int], Experts | None] | None = None
    latent: Callable[[Fields], Latent] | None = None
    shapes: Callable[[Fields, int], tuple[LayerShape, ...]] | None = None


def of_config(value: T | Callable[[Fields], T], config: Fields) -> T:
    """Returns a value of a record that may depend on the configuration."""
    return value(config) if callable(value) else value


def same_window(config: Fields, num_layers: int) -> Windows:
    """``sliding_window`` on every layer."""
    return (config.size_or_none("sliding_window"),) * num_layers


def windows_by_type(config: Fields, num_layers: int, types: list[str], window: int | None) -> Windows:
    """Returns the window on layers of ``layer_types`` that slide; ``types`` where there is no such field."""
    given = types if config["layer_types"] is None else config["layer_types"]
    allowed: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        allowed["sliding_attention"] = window
    if not isinstance(given, list) or len(given) != num_layers or not all(kind in allowed for kind in given):
        raise config.error("layer_types", f"{num_layers} times {' or '.join(allowed)}")
    return tuple(allowed[kind] for kind in given)
