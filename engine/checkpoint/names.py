"""The tensors that a checkpoint of an architecture has: their names and shapes. Knows no torch."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence, Set, Sized
from dataclasses import dataclass

from engine.checkpoint.config_fields import CheckpointError, Shape
from engine.checkpoint.model_config import POSITION_OFFSET, DecoderConfig


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A checkpoint's names of its tensors; those of a layer without ``layers.N.``. Llama's by default."""

    model: str = "model"
    norm: str = "norm"
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    post_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"

    @property
    def embedding(self) -> str:
        return f"{self.model}.embed_tokens.weight"

    def layer(self, index: int) -> str:
        """Prefix of the names of a layer's tensors."""
        return f"{self.model}.layers.{index}."


TENSOR_NAMES = {
    "Phi3ForCausalLM": TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "OPTForCausalLM": TensorNames(
        model="model.decoder",
        norm="final_layer_norm",
        input_norm="self_attn_layer_norm",
        out="self_attn.out_proj",
        post_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
    ),
}
"""By architecture, where the names are not Llama's."""


def names_of(config: DecoderConfig) -> TensorNames:
    """The names in a checkpoint of such a model."""
    return TENSOR_NAMES.get(config.architecture, TensorNames())


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every tensor of a checkpoint of such a model, by its name."""
    names, hidden = names_of(config), config.hidden_size
    shapes: dict[str, Shape] = {names.embedding: (config.vocab_size, hidden)}
    if config.rotary is None:
        rows = config.max_position_embeddings + POSITION_OFFSET
        shapes[f"{names.model}.embed_positions.weight"] = (rows, hidden)
    for index in range(config.num_hidden_layers):
        prefix = names.layer(index)
        shapes.update((prefix + name, shape) for name, shape in _layer_shapes(config, names))
    if config.final_norm:
        shapes.update(_norm(f"{names.model}.{names.norm}", config))
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: DecoderConfig, names: TensorNames) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    yield from _norm(names.input_norm, config)
    yield from _linear(names.qkv, [query, kv, kv], hidden, bias=config.qkv_bias)
    if config.qk_norm:
        yield from ((f"self_attn.{name}.weight", (config.head_dim,)) for name in ("q_norm", "k_norm"))
    yield from _linear([names.out], [hidden], query, bias=config.out_bias)
    yield from _norm(names.post_norm, config)
    yield from _linear(names.up, [inner] * (config.up_size // inner), hidden, bias=config.mlp_bias)
    yield from _linear([names.down], [hidden], inner, bias=config.mlp_bias)


def _norm(name: str, config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm == "layer":
        yield f"{name}.bias", (config.hidden_size,)


def _linear(names: Sequence[str], sizes: list[int], inputs: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    """A layer of ``sum(sizes)`` outputs, in so many tensors or in a single one."""
    for name, size in zip(names, sizes if len(names) > 1 else [sum(sizes)], strict=True):
        yield f"{name}.weight", (size, inputs)
        if bias:
            yield f"{name}.bias", (size,)


def known_name(found: str, targets: Container[str], config: DecoderConfig) -> str | None:
    """Which of the target tensors this tensor of a checkpoint is; None if it carries nothing.

    Raises:
        CheckpointError: a tensor that such a model does not have.
    """
    name = found if found in targets else f"model.{found}"  # a checkpoint of the model without its head
    if name in targets:
        return name
    if _may_be_ignored(found, config):
        return None
    expected = f"only tensors of {config.architecture} with {config.num_hidden_layers} layers"
    raise CheckpointError(found, "a tensor of that name", expected)


def check_complete(missing: Set[str], targets: Sized) -> None:
    """Raises CheckpointError if tensors are missing."""
    if missing:
        raise CheckpointError(min(missing), "nothing", f"a tensor ({len(missing)} of {len(targets)} are missing)")


def _may_be_ignored(name: str, config: DecoderConfig) -> bool:
    """Tensors that carry nothing: a second copy of tied embeddings, and the rotary tables of old checkpoints."""
    return (name == "lm_head.weight" and config.tie_word_embeddings) or name.endswith("rotary_emb.inv_freq")
