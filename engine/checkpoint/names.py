"""The tensors that a checkpoint of an architecture has: their names and shapes. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence, Set, Sized

from farsight.engine.checkpoint.config_fields import CheckpointError, Shape
from farsight.engine.checkpoint.families.mixers import DeltaNet, Mixer
from farsight.engine.checkpoint.families.record import Experts, Latent, LayerShape
from farsight.engine.checkpoint.model_config import DecoderConfig


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every tensor of a checkpoint of such a model, by its name."""
    names, hidden = config.names, config.hidden_size
    shapes: dict[str, Shape] = {f"{names.embedding}.weight": (config.vocab_size, hidden)}
    if names.embedding_norm:
        shapes.update(_norm(names.embedding_norm, config))
    if names.positions:
        shapes[f"{names.positions}.weight"] = (config.max_position_embeddings + names.unused_positions, hidden)
    if config.blocks.layer_inputs:
        width = config.blocks.layer_inputs
        embedding, projection, norm = names.all_inputs
        shapes[f"{embedding}.weight"] = (config.vocab_size, config.num_hidden_layers * width)
        shapes[f"{projection}.weight"] = (config.num_hidden_layers * width, hidden)
        shapes[f"{norm}.weight"] = (width,)
    for index in range(config.num_hidden_layers):
        prefix = names.layer(index)
        shapes.update((prefix + name, shape) for name, shape in _layer_shapes(config, index))
    if names.norm:
        shapes.update(_norm(names.norm, config))
    if not config.tie_word_embeddings:
        shapes[f"{names.lm_head}.weight"] = (config.vocab_size, hidden)
    if config.biases.head:
        shapes[f"{names.lm_head}.bias"] = (config.vocab_size,)
    return shapes


def num_parameters(config: DecoderConfig) -> int:
    """Numbers in all tensors of such a model."""
    return sum(map(math.prod, tensor_shapes(config).values()))


def layer_norms(config: DecoderConfig) -> list[str]:
    """Names of the norms of a layer."""
    names, blocks = config.names, config.blocks
    before = [names.input_norm] if blocks.one_norm else [names.input_norm, names.post_norm]
    after = [names.after_attention, names.after_mlp] if blocks.norm_after else []
    return (before if blocks.norm_before else []) + after


def head_norm_sizes(config: DecoderConfig, shape: LayerShape) -> tuple[int, int]:
    """Values of the weights of the norms of queries and of keys."""
    if config.blocks.head_norm == "all":
        return config.num_attention_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.head_dim, shape.head_dim


def active_parameters(config: DecoderConfig) -> int:
    """Numbers in the tensors that one token is computed with: of each mixture, its own experts alone."""
    experts = config.experts
    if experts is None:
        return num_parameters(config)
    halves = config.up_size // config.intermediate_size
    each = experts.inner * config.hidden_size * (1 + halves)
    if config.biases.mlp:
        each += experts.inner * halves + config.hidden_size
    return num_parameters(config) - sum(experts.layers) * (experts.count - experts.active) * each


def _layer_shapes(config: DecoderConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    names, shape = config.names, config.shape(layer)
    hidden, experts = config.hidden_size, config.mixture(layer)
    for name in layer_norms(config):
        yield from _norm(name, config)
    if shape.mixer is not None:
        yield from _mixer_shapes(config, shape.mixer)
    elif config.latent is None:
        yield from _attention_shapes(config, shape)
    else:
        yield from _latent_shapes(config, config.latent)
        yield from _linear([names.out], [hidden], config.attended_size, config, bias=config.biases.out)
    if config.blocks.layer_inputs:
        gate, projection, norm = names.inputs
        yield f"{gate}.weight", (config.blocks.layer_inputs, hidden)
        yield f"{projection}.weight", (hidden, config.blocks.layer_inputs)
        yield from _norm(norm, config)
    if config.blocks.layer_scale:
        yield names.layer_scale, (1,)
    if experts is None or experts.beside:
        yield from _mlp_shapes(config, names.up, names.down, shape.inner)
    if experts is not None:
        yield from _mixture_shapes(config, experts)


def _attention_shapes(config: DecoderConfig, shape: LayerShape) -> Iterator[tuple[str, Shape]]:
    names, biases, blocks = config.names, config.biases, config.blocks
    parts, sizes = qkv_parts(config, shape)
    yield from _linear(parts, sizes, config.hidden_size, config, bias=biases.qkv)
    if blocks.head_norm:
        head_norms = zip((names.q_norm, names.k_norm), head_norm_sizes(config, shape), strict=True)
        for name, size in list(head_norms)[: 1 if shape.kv_of is not None else 2]:
            yield f"{name}.weight", (size,)
    attended = config.num_attention_heads * shape.head_dim
    yield from _linear([names.out], [config.hidden_size], attended, config, bias=biases.out)
    if blocks.sinks:
        yield names.sinks, (config.num_attention_heads,)


def qkv_parts(config: DecoderConfig, shape: LayerShape) -> tuple[tuple[str, ...], list[int]]:
    """The tensors that a layer's first matrix is made of, and their outputs; keys that are values too come once."""
    query = config.num_attention_heads * shape.head_dim * (2 if config.blocks.attention_gate else 1)
    kv = shape.kv_heads * shape.head_dim
    if shape.kv_of is not None:
        return config.names.qkv[:1], [query]
    if shape.one_key:
        return config.names.qkv[:2], [query, kv]
    return config.names.qkv, [query, kv, kv]


def mixer_parts(config: DecoderConfig, mixer: Mixer) -> tuple[list[str], list[int]]:
    """The same of a layer with a state in place of attention; the names are those of the layer."""
    names, outputs = config.names, list(mixer.outputs)
    if len(names.mixer_in) == 1:
        outputs = [sum(outputs)]
    elif len(names.mixer_in) == 2:  # Qwen3-Next: all but the strengths and decays lie together
        outputs = [outputs[0] + outputs[1], outputs[2] + outputs[3]]
    return [names.of_mixer(name) for name in names.mixer_in], outputs


def _mixer_shapes(config: DecoderConfig, mixer: Mixer) -> Iterator[tuple[str, Shape]]:
    names, hidden, bias = config.names, config.hidden_size, not isinstance(mixer, DeltaNet) and mixer.bias
    parts, sizes = mixer_parts(config, mixer)
    yield from _linear(parts, sizes, hidden, config, bias=bias)
    yield from _linear([names.of_mixer(names.mixer_out)], [hidden], mixer.mixed, config, bias=bias)
    conv = names.of_mixer(names.mixer_conv)
    yield f"{conv}.weight", (mixer.convolved, 1, mixer.length)
    if bias:
        yield f"{conv}.bias", (mixer.convolved,)
    if isinstance(mixer, DeltaNet):
        yield names.of_mixer(names.rates), (mixer.value_heads,)
        yield names.of_mixer(names.steps), (mixer.value_heads,)
        yield names.of_mixer(names.mixer_norm), (mixer.value,)


def _mixture_shapes(config: DecoderConfig, experts: Experts) -> Iterator[tuple[str, Shape]]:
    names, hidden = config.names, config.hidden_size
    yield f"{names.router}.weight", (experts.count, hidden)
    if experts.correction:
        yield names.correction, (1, experts.count) if names.correction_rows else (experts.count,)
    if experts.router_bias:
        yield f"{names.router}.bias", (experts.count,)
    yield from _expert_shapes(config, experts)
    if experts.shared_inner:
        yield from _mlp_shapes(config, names.shared_up, names.shared_down, experts.shared_inner)
    if experts.shared_gate:
        yield f"{names.shared_gate}.weight", (1, hidden)
    if experts.beside:
        of_router, of_experts, *norms = names.beside
        yield of_router, (hidden,)
        yield of_experts, (experts.count,)
        for name in norms:
            yield from _norm(name, config)


def latent_sizes(config: DecoderConfig, latent: Latent) -> list[int]:
    """Outputs of the two parts of a layer's first matrix: queries or their latent, and the token's row."""
    return [latent.q_rank or config.num_attention_heads * latent.query, latent.width]


def _latent_shapes(config: DecoderConfig, latent: Latent) -> Iterator[tuple[str, Shape]]:
    names, heads = config.names, config.num_attention_heads
    yield from _linear(names.qkv, latent_sizes(config, latent), config.hidden_size, config, bias=False)
    yield f"{names.k_norm}.weight", (latent.rank,)
    yield f"{names.kv_up}.weight", (heads * (latent.plain + latent.value), latent.rank)
    if latent.q_rank is not None:
        yield f"{names.q_norm}.weight", (latent.q_rank,)
        yield f"{names.q_up}.weight", (heads * latent.query, latent.q_rank)


def _mlp_shapes(config: DecoderConfig, up: Sequence[str], down: str, inner: int) -> Iterator[tuple[str, Shape]]:
    halves = config.up_size // config.intermediate_size
    yield from _linear(up, [inner] * halves, config.hidden_size, config, bias=config.biases.mlp)
    yield from _linear([down], [config.hidden_size], inner, config, bias=config.biases.mlp)


def _expert_shapes(config: DecoderConfig, experts: Experts) -> Iterator[tuple[str, Shape]]:
    """Each expert in tensors of its own, or all in one with their number as first dimension."""
    up, down = config.names.expert_up, config.names.expert_down
    if "{}" not in down:
        yield from _stacked_shapes(config, experts)
        return
    for i in range(experts.count):
        yield from _mlp_shapes(config, [name.format(i) for name in up], down.format(i), experts.inner)


def _stacked_shapes(config: DecoderConfig, experts: Experts) -> Iterator[tuple[str, Shape]]:
    names, hidden = config.names, config.hidden_size
    weight, bias = names.expert_ends
    outputs = experts.inner * (config.up_size // config.intermediate_size) // len(names.expert_up)
    first = [(name, outputs, hidden) for name in names.expert_up]
    for name, size, inputs in (*first, (names.expert_down, hidden, experts.inner)):
        shape = (inputs, size) if names.expert_transposed else (size, inputs)
        yield f"{name}{weight}", (experts.count, *shape)
        if config.biases.mlp:
            yield f"{name}{bias}", (experts.count, size)


def _norm(name: str, config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm == "layer" and config.blocks.norm_bias:
        yield f"{name}.bias", (config.hidden_size,)


def _linear(
    names: Sequence[str], sizes: list[int], inputs: int, config: DecoderConfig, *, bias: bool
) -> Iterator[tuple[str, Shape]]:
    """A layer of ``sum(sizes)`` outputs, in so many tensors or in a single one."""
    for name, size in zip(names, sizes if len(names) > 1 else [sum(sizes)], strict=True):
        yield f"{name}.weight", (inputs, size) if config.names.transposed else (size, inputs)
        if bias:
            yield f"{name}.bias", (size,)


def known_name(found: str, targets: Container[str], config: DecoderConfig) -> str | None:
    """Which of the target tensors this tensor of a checkpoint is; None if it carries nothing.

    Raises:
        CheckpointError: a tensor that such a model does not have.
    """
    if found.startswith(config.names.elsewhere):
        return None
    found = own_name(found, config)
    whole = config.names.layers.split(".")[0]
    name = found if found in targets else f"{whole}.{found}"  # a checkpoint of the model without its head
    if name in targets:
        return name
    if _may_be_ignored(found, config):
        return None
    expected = f"only tensors of {config.architecture} with {config.num_hidden_layers} layers"
    raise CheckpointError(found, "a tensor of that name", expected)


def own_name(found: str, config: DecoderConfig) -> str:
    """A tensor's name without what a checkpoint that holds more than the model puts before it."""
    for beginning, instead in config.names.renamed:
        if found.startswith(beginning):
            found = instead + found.removeprefix(beginning)
            break
    return dict(config.names.aliases).get(found, found)


def check_complete(missing: Set[str], targets: Sized) -> None:
    """Raises CheckpointError if tensors are missing."""
    if missing:
        raise CheckpointError(min(missing), "nothing", f"a tensor ({len(missing)} of {len(targets)} are missing)")


def _may_be_ignored(name: str, config: DecoderConfig) -> bool:
    """Tensors that carry nothing: a second copy of tied embeddings, and buffers of old checkpoints."""
    copied = config.tie_word_embeddings and name == f"{config.names.lm_head}.weight"
    further = config.names.further_layers and name.startswith(config.names.layer(config.num_hidden_layers))
    return copied or further or _is_unread_kv(name, config) or name.endswith(config.names.ignored)


def _is_unread_kv(name: str, config: DecoderConfig) -> bool:
    """Keys and values of a layer that reads those of an earlier one."""
    number, _, rest = name.removeprefix(f"{config.names.layers}.").partition(".")
    if config.shapes is None or not number.isdigit() or int(number) >= config.num_hidden_layers:
        return False
    unread = (*config.names.qkv[1:], config.names.k_norm)
    return config.shape(int(number)).kv_of is not None and rest.rsplit(".", 1)[0] in unread
