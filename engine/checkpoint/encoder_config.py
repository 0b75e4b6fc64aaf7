"""What the files of an encoder's directory say, and how a model's hidden states become embeddings. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from farsight.core.abilities import Abilities
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.engine.checkpoint.config_fields import CheckpointError, Fields, Shape, UnsupportedModelError, read_json
from farsight.engine.checkpoint.families.encoder import ENCODERS, EncoderArchitecture
from farsight.engine.checkpoint.families.record import ACTIVATIONS
from farsight.engine.checkpoint.gguf_encoder import GGUF_ENCODERS, gguf_encoder_config, gguf_encoder_tensors
from farsight.engine.checkpoint.model_config import MAX_LAYERS, DecoderConfig, load_model_config
from farsight.engine.checkpoint.rotary_config import RotaryConfig
from farsight.engine.checkpoint.stored import FLOATS, StoredTensor, stored_tensors
from farsight.tokenization.gguf_file import gguf_architecture, is_gguf, read_gguf
from farsight.tokenization.model_dir import model_file, read_json_file

_POOLING_MODES: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""By their names in the configuration of a pooling module of sentence-transformers."""

_DENSE_ACTIVATIONS = ("Tanh", "Identity", "ReLU", "GELU")
"""Last part of the name of the class in torch."""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A layer that follows pooling.

    Attributes:
        folder: Where its weights are, in the model's directory.
    """

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """How hidden states become an embedding: what the modules of sentence-transformers say.

    Attributes:
        dense: Layers after pooling, in their order.
        normalizes: Whether the result is brought to length 1.
        score_ids: As in ``Abilities``.
    """

    pooling: str
    dense: tuple[DenseConfig, ...] = ()
    normalizes: bool = True
    score_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shape of an encoder; names as in transformers.

    Attributes:
        architecture: A key of ``ENCODERS``.
        max_len: Most tokens of a text.
        first_position: Row of the position table of a text's first token.
        num_labels: Outputs of the classifier; 0 if it has none.
        squashes: Whether a score is brought into 0 to 1 by the logistic function.
        sentence: How its embeddings are made.
        rotary: How positions turn queries and keys; None where they do not.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    first_position: int
    type_vocab_size: int
    norm_eps: float
    activation: Literal["silu", "relu", "gelu", "gelu_tanh"]
    num_labels: int
    squashes: bool
    checkpoint_dtype: str
    sentence: SentenceConfig
    rotary: RotaryConfig | None = None

    @property
    def max_len(self) -> int:
        return self.max_position_embeddings - self.first_position

    @property
    def record(self) -> EncoderArchitecture:
        return ENCODERS[self.architecture]


def load_encoder_config(model_dir: Path) -> EncoderConfig | None:
    """The configuration of an encoder; None for a directory of another kind of model.

    Raises:
        UnsupportedModelError: A feature that the engine does not compute.
        InvalidValueError: A file that cannot be read.
    """
    if is_gguf(model_dir):
        if gguf_architecture(model_dir) not in GGUF_ENCODERS:
            return None
        raw, pooling = gguf_encoder_config(read_gguf(model_dir))
    else:
        raw, pooling = read_json(model_dir, "config.json") or {}, "mean"
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    record = ENCODERS.get(name) if isinstance(name, str) else None
    if name is None or record is None or (record.only_gguf and not is_gguf(model_dir)):
        return None
    fields = Fields(raw, record.defaults, spelled={"norm_eps": "layer_norm_eps"})
    _check_positions(fields)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden % heads:
        raise fields.error("hidden_size", f"a multiple of the {heads} attention heads")
    config = EncoderConfig(
        architecture=name,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=fields.size("num_hidden_layers", MAX_LAYERS),
        num_attention_heads=heads,
        max_position_embeddings=fields.size("max_position_embeddings"),
        first_position=_padding_id(fields) + 1 if record.after_padding else 0,
        type_vocab_size=fields.size("type_vocab_size"),
        norm_eps=fields.positive("norm_eps"),
        activation=ACTIVATIONS[fields.require("hidden_act", ACTIVATIONS)],
        num_labels=_num_labels(fields) if record.classifier else 0,
        squashes=_squashes(raw),
        checkpoint_dtype=str(fields["dtype"] or fields["torch_dtype"] or "float32").removeprefix("torch."),
        sentence=read_sentence(model_dir, hidden, pooling),
        rotary=RotaryConfig(hidden // heads, fields.positive("rope_theta")) if record.rotary else None,
    )
    if config.max_len < 1:
        raise fields.error("max_position_embeddings", f"more than {config.first_position}")
    return config


def abilities_of(model_dir: Path) -> Abilities:
    """What the model in a directory can do. One that the engine cannot compute can only generate, on another server.

    Raises:
        InvalidValueError: A file of an encoder or of its modules cannot be read, or is not supported.
    """
    encoder = load_encoder_config(model_dir)
    if encoder is not None:
        sentence = encoder.sentence
        dim = sentence.dense[-1].outputs if sentence.dense else encoder.hidden_size
        if encoder.num_labels:
            return Abilities(generates=False, num_labels=encoder.num_labels, squashes=encoder.squashes)
        return Abilities(generates=False, pooling=sentence.pooling, dim=dim, normalizes=sentence.normalizes)
    try:
        decoder = load_model_config(model_dir)
    except InvalidValueError:
        return Abilities()
    sentence = read_sentence(model_dir, decoder.hidden_size, "last")
    if sentence.score_ids:
        return _reranker(model_dir, decoder, sentence.score_ids)
    if sentence.dense:
        raise UnsupportedModelError("modules.json", "Dense", "no further layers behind the embeddings of a decoder")
    if sentence.pooling == "cls":
        raise UnsupportedModelError("pooling_mode_cls_token", True, "the last token, or the mean, of a decoder")
    return Abilities(pooling=sentence.pooling, dim=decoder.hidden_size, normalizes=sentence.normalizes)


def _reranker(model_dir: Path, config: DecoderConfig, score_ids: tuple[int, ...]) -> Abilities:
    """A decoder that scores two texts by the logits of words such as yes and no, as Qwen3-Reranker does."""
    if max(score_ids) >= config.vocab_size or min(score_ids) < 0:
        expected = f"token ids below the vocabulary's size, {config.vocab_size}"
        raise CheckpointError("LogitScore", list(score_ids), expected)
    raw = read_json(model_dir, "config_sentence_transformers.json") or {}
    prompts, name = raw.get("prompts"), raw.get("default_prompt_name")
    told = prompts.get(name) if isinstance(prompts, dict) else None
    given = (read_json(model_dir, "sentence_bert_config.json") or {}).get("processing_kwargs")
    chat = given.get("chat_template") if isinstance(given, dict) else None
    return Abilities(
        num_labels=1,
        squashes=_squashes({"sentence_transformers": raw}),
        score_ids=score_ids,
        instruction=told if isinstance(told, str) else "",
        begins_turn=isinstance(chat, dict) and chat.get("add_generation_prompt") is True,
    )


def read_sentence(model_dir: Path, hidden_size: int, default: str) -> SentenceConfig:
    """What ``modules.json`` says; without it, ``default`` pooling to embeddings of length 1.

    Raises:
        UnsupportedModelError: A module, or a kind of pooling, that is not computed.
        InvalidValueError: A file that cannot be read.
    """
    path = None if is_gguf(model_dir) else model_file(model_dir, "modules.json")
    if path is None:
        return SentenceConfig(default)
    modules = read_json_file(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UnsupportedModelError("modules.json", modules, "a list of modules")
    pooling, normalizes, dense = default, False, []
    scores: tuple[int, ...] = ()
    width = hidden_size
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        folder = _folder(module)
        if kind == "Pooling":
            pooling = _pooling(read_json(model_dir, f"{folder}/config.json") or {}, default)
        elif kind == "Normalize":
            normalizes = True
        elif kind == "LogitScore":
            told = read_json(model_dir, f"{folder}/config.json") or {}
            scores = tuple(told[key] for key in ("true_token_id", "false_token_id") if told.get(key) is not None)
            if not scores or not all(type(each) is int for each in scores):
                raise UnsupportedModelError(f"{folder}/config.json", told, "true_token_id, an integer")
        elif kind == "Dense":
            dense.append(_dense(folder, read_json(model_dir, f"{folder}/config.json") or {}, width))
            width = dense[-1].outputs
        elif kind != "Transformer":
            expected = "Transformer, Pooling, Dense, Normalize or LogitScore"
            raise UnsupportedModelError("modules.json", module.get("type"), expected)
    return SentenceConfig(pooling, tuple(dense), normalizes, scores)


def _folder(module: Mapping[str, Any]) -> str:
    folder = module.get("path", "")
    if not isinstance(folder, str) or ".." in PurePosixPath(folder).parts or folder.startswith("/"):
        raise UnsupportedModelError("modules.json", folder, "a folder of the model's directory")
    return folder


def _pooling(raw: Mapping[str, Any], default: str) -> str:
    asked = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(raw.get("pooling_mode"), str):  # the spelling of later versions
        asked = [f"pooling_mode_{raw['pooling_mode']}_token{'s' if raw['pooling_mode'] == 'mean' else ''}"]
        asked = ["pooling_mode_lasttoken" if "last" in each else each for each in asked]
    if not asked:
        return default
    if len(asked) > 1 or asked[0] not in _POOLING_MODES:
        raise UnsupportedModelError("1_Pooling/config.json", asked, f"one of {', '.join(_POOLING_MODES)}")
    return _POOLING_MODES[asked[0]]


def _dense(folder: str, raw: dict[str, Any], width: int) -> DenseConfig:
    fields = Fields(raw, {"bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}, f"{folder}.")
    activation = str(fields["activation_function"]).rpartition(".")[2]
    if activation not in _DENSE_ACTIVATIONS:
        raise fields.error("activation_function", f"one of {', '.join(_DENSE_ACTIVATIONS)}")
    if fields.size("in_features") != width:
        raise fields.error("in_features", f"{width}, what comes before it")
    return DenseConfig(folder, width, fields.size("out_features"), fields.flag("bias"), activation)


def _check_positions(fields: Fields) -> None:
    if fields["position_embedding_type"] not in (None, "absolute"):
        raise fields.error("position_embedding_type", json.dumps("absolute"))
    if fields["is_decoder"] or fields["add_cross_attention"]:
        raise UnsupportedModelError("is_decoder", True, "false")


def _padding_id(fields: Fields) -> int:
    value = fields["pad_token_id"]
    if type(value) is not int or value < 0:
        raise fields.error("pad_token_id", "an integer >= 0")
    return value


def _squashes(raw: Mapping[str, Any]) -> bool:
    """False where cross-encoders of sentence-transformers say that their logits are the scores."""
    told = raw.get("sentence_transformers")
    name = told.get("activation_fn") if isinstance(told, dict) else raw.get("sbert_ce_default_activation_function")
    return not str(name).endswith("Identity")


def _num_labels(fields: Fields) -> int:
    labels = fields["id2label"]
    if isinstance(labels, dict) and labels:
        return len(labels)
    return 2 if fields["num_labels"] is None else fields.size("num_labels")


def resolve_encoder_len(config: EncoderConfig, asked: int) -> int:
    """Tokens of a text by what was asked for; 0 asks for the model's own.

    Raises:
        ConfigError: More than the model has positions.
    """
    if asked > config.max_len:
        raise ConfigError("engine.max_model_len", asked, f"at most {config.max_len}, the model's own context")
    return asked or config.max_len


def encoder_shapes(config: EncoderConfig) -> dict[str, Shape]:
    """The tensors that are read, by their names without the prefix, with their shapes."""
    hidden, inner = config.hidden_size, config.intermediate_size
    record = config.record
    shapes: dict[str, Shape] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, hidden),
    }
    if not record.rotary:
        shapes["embeddings.position_embeddings.weight"] = (config.max_position_embeddings, hidden)
    norms = ["embeddings.LayerNorm"]
    linears: dict[str, Shape] = {}
    for index in range(config.num_hidden_layers):
        layer = f"encoder.layer.{index}."
        norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
        rows = hidden * 3 // len(record.qkv)
        linears |= {f"{layer}attention.self.{name}": (rows, hidden) for name in record.qkv}
        linears[f"{layer}attention.output.dense"] = (hidden, hidden)
        linears |= {f"{layer}{name}": (inner, hidden) for name in record.up}
        linears[f"{layer}output.dense"] = (hidden, inner)
    if record.classifier == "pooled":
        linears |= {"pooler.dense": (hidden, hidden), "classifier": (config.num_labels, hidden)}
    elif record.classifier == "two":
        linears |= {"classifier.dense": (hidden, hidden), "classifier.out_proj": (config.num_labels, hidden)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if record.biased else {})
    return shapes


def check_encoder(model_dir: Path, config: EncoderConfig) -> None:
    """Reads the headers of an encoder's files.

    Raises:
        CheckpointError: A damaged file, or a missing or odd tensor; names it.
    """
    if is_gguf(model_dir):
        gguf_encoder_tensors(read_gguf(model_dir), encoder_shapes(config))
    else:
        encoder_tensors(model_dir, config)


def encoder_tensors(model_dir: Path, config: EncoderConfig) -> dict[str, StoredTensor]:
    """Returns the tensors of a directory's encoder by the names of ``encoder_shapes``, from headers alone.

    Raises:
        CheckpointError: As ``check_encoder``.
    """
    known = encoder_shapes(config)
    found = {_plain_name(name, config): tensor for name, tensor in stored_tensors(model_dir).items()}
    check_tensors(found, known)
    for layer in config.sentence.dense:
        dense_tensors(model_dir, layer)
    return {name: found[name] for name in known}


def dense_tensors(model_dir: Path, layer: DenseConfig) -> dict[str, StoredTensor]:
    """The tensors of a layer behind pooling.

    Raises:
        CheckpointError: As ``check_encoder``.
    """
    known: dict[str, Shape] = {"linear.weight": (layer.outputs, layer.inputs)}
    if layer.bias:
        known["linear.bias"] = (layer.outputs,)
    found = stored_tensors(model_dir / layer.folder)
    check_tensors(found, known)
    return {name: found[name] for name in known}


def check_tensors(found: Mapping[str, StoredTensor], known: Mapping[str, Shape]) -> None:
    """
    Raises:
        CheckpointError: A tensor is missing, or is not of its shape and a float type.
    """
    for name, shape in known.items():
        tensor = found.get(name)
        if tensor is None:
            raise CheckpointError(name, "no such tensor", f"a tensor of shape {list(shape)}")
        if tensor.shape != shape or tensor.dtype not in FLOATS:
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(name, got, f"float32, bfloat16 or float16 of shape {list(shape)}")


def _plain_name(name: str, config: EncoderConfig) -> str:
    """Without the prefix; old checkpoints call the weights of a LayerNorm by Greek letters."""
    name = name.removeprefix(config.record.prefix)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
