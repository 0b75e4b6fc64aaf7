"""The tokenizer that a GGUF file describes is the one that the model's own ``tokenizer.json`` holds."""

from __future__ import annotations

import functools
import importlib
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from farsight import services
from farsight.engine.vocabulary import vocabulary_size
from farsight.tokenization.gguf_file import GGUFError, GGUFFile, read_gguf
from farsight.tokenization.gguf_texts import gguf_end_ids, gguf_tokenizer
from farsight.tokenization.loading import load_tokenizer
from farsight.tokenization.model_files import load_model_texts
from tests.unit.tokenization.kinds import CORPUS

EMBEDDED = Path(services.__file__).parent / "embedded_model"

ODD = [
    "", " ", "  ", "\n", "\r\n\t ", "a", " a", "a ", "hello world", "Hello  World   ",
    "I'll we're THEY'VE don't 'tis", "1", "12", "123", "1234567", "3.14159 1,000 ½ ² ٣", "a" * 60,
    "naïve café Å A\u030a é e\u0301", "日本語のテキスト 中文", "🙂👩\u200d👩\u200d👧 🇩🇪", "x\u0000y\u200bz\ufeff",
    "<s>", "a <s>b</s> c", "<|im_start|>user\nhi<|im_end|>", "<think>hm</think>", "<0x41><unk>", "▁under ▁ _",
    "if (x != 0) { return y[1]->z; } // ok", "    four\n        eight\n\n\n", "camelCaseWord HTTPServer ALLCAPS",
    "https://example.org/a?b=c&d=%20", "\u017f ﬁ Ω \u210c", "\u3000full\u2003em\u00a0nbsp", "tab\tseparated\tvalues",
]  # fmt: skip
"""Texts in which tokenizers differ: spaces, digits, cases, marks, other scripts, control tokens, bytes."""


@functools.cache
def odd_texts() -> list[str]:
    """Those, and random strings of their characters."""
    rng = random.Random(5)
    characters = sorted(set("".join([*ODD, *CORPUS])))
    return ODD + CORPUS + ["".join(rng.choices(characters, k=rng.randint(1, 40))) for _ in range(100)]


def assert_same(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in odd_texts():
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special).ids
            found = ours.encode(text, add_special_tokens=special).ids
            assert found == expected, (text, ours.encode(text).tokens, theirs.encode(text).tokens)
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected, skip_special_tokens=False)
        assert ours.decode(expected) == theirs.decode(expected)


def save(
    folder: Path,
    tokenizer: Tokenizer,
    pre: str,
    *,
    add_bos: bool = False,
    num_unused: int = 0,
    template: str = "",
    **roles: str,
) -> Path:
    """The tokenizer as the converter writes one of bytes."""
    raw = json.loads(tokenizer.to_str())
    added = {token["content"]: token for token in raw["added_tokens"]}
    ids = raw["model"]["vocab"] | {content: token["id"] for content, token in added.items()}
    tokens = [f"[PAD{index}]" for index in range(max(ids.values()) + 1 + num_unused)]
    for token, index in ids.items():
        tokens[index] = token
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([int(_type(token, added, ids)) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in raw["model"]["merges"]])
    writer.add_add_bos_token(add_bos)
    for role, token in roles.items():
        getattr(writer, f"add_{role}_token_id")(ids[token])
    if template:
        writer.add_chat_template(template)
    return close(writer, folder)


def _type(token: str, added: Mapping[str, Any], ids: Mapping[str, int]) -> gguf.TokenType:
    if token not in ids:
        return gguf.TokenType.UNUSED
    if token not in added:
        return gguf.TokenType.NORMAL
    return gguf.TokenType.CONTROL if added[token]["special"] else gguf.TokenType.USER_DEFINED


def close(writer: gguf.GGUFWriter, folder: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), plain])


def qwen_pattern(name: str) -> str:
    found: str = importlib.import_module(f"transformers.models.{name}.tokenization_{name}").PRETOKENIZE_REGEX
    return found


PRE: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": lambda: split(LLAMA3),
    "qwen2": lambda: split(qwen_pattern("qwen2")),
    "qwen35": lambda: split(qwen_pattern("qwen3_5")),
    "tekken": lambda: split(TEKKEN),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def byte_level(pre: str, *, bos: bool) -> Tokenizer:
    """As the models that have such a pre-tokenizer; trained on texts in which the pre-tokenizers differ."""
    whole_words = pre in ("llama-bpe", "tekken")
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.normalizer = normalizers.NFC() if pre.startswith("qwen") else None
    tokenizer.pre_tokenizer = PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *ODD] * 3, trainer)
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if bos:
        number = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    return tokenizer


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("pre", PRE)
def test_byte_level_tokenizers(pre, bos, tmp_path):
    theirs = byte_level(pre, bos=bos)
    roles: dict[str, Any] = {"eos": "<|im_end|>", "bos": "<s>"}
    path = save(tmp_path, theirs, pre, add_bos=bos, **roles)
    assert_same(load_tokenizer(path), theirs)


def test_a_tokenizer_of_gemma_4(tmp_path):
    """Spaces are characters, bytes stand for what is missing, the file lists the merges; some tokens end an output."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", "<|tool_response>"]
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=marks + alphabet, show_progress=False)
    trained.train_from_iterator([*CORPUS, *ODD[:12]] * 3, trainer)
    raw = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in raw["merges"]]
    theirs = Tokenizer(models.BPE(raw["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = trained.normalizer
    theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    theirs.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in marks])
    theirs.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "gemma4")
    writer.add_tokenizer_model("gemma4")
    tokens = sorted(raw["vocab"], key=raw["vocab"].__getitem__)
    writer.add_token_list(tokens)
    kinds = {**dict.fromkeys(alphabet, gguf.TokenType.BYTE), **dict.fromkeys(marks, gguf.TokenType.CONTROL)}
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    for role, token_id in (("bos", 2), ("eos", 1), ("unk", 3)):
        getattr(writer, f"add_{role}_token_id")(token_id)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    assert_same(load_tokenizer(tmp_path / "model.gguf"), theirs)
    assert gguf_end_ids(read_gguf(tmp_path / "model.gguf")) == (1, 4, 5)


PLAIN = [
    "hello world", " Hello  World ", "naïve café 日本語 🙂", "12345 + 67 = ?", "if (x != 0) {\n\treturn y;\n}\n",
    "I'll we're THEY'VE don't", "camelCaseWord HTTPServer", "    four\n        eight\n\n\n", "3.14159 1,000",
]  # fmt: skip
"""Texts in which llama.cpp is expected to follow the models' own tokenizers."""


def llama_cpp_ids(path: Path, text: str) -> list[int]:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is no dependency")
    settings = llama_cpp.llama_model_default_params()
    settings.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    data = text.encode()
    found = (llama_cpp.llama_token * (len(data) + 8))()
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), found, len(found), False, False)
    llama_cpp.llama_model_free(model)
    return list(found[:count])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "pre", ["gpt-2", "refact", "command-r", "llama-bpe", "lfm2", "glm4", "qwen2", "qwen35", "tekken", "llama"]
)
def test_ids_are_those_of_llama_cpp(pre, tmp_path):
    """Both read one file."""
    if pre == "llama":
        tokens = [each for each in scored(space=False)[1] if "\0" not in each[0]]  # where llama.cpp's would end
        path = save_scored(tmp_path, tokens, space=False)
    else:
        alike = {"refact": "smollm", "command-r": "smollm", "glm4": "llama-bpe", "lfm2": "llama-bpe"}.get(pre, pre)
        roles: dict[str, Any] = {"eos": "<|im_end|>", "bos": "<s>"}
        path = save(tmp_path, byte_level(alike, bos=False), pre, **roles)
    ours = load_tokenizer(path)
    for text in PLAIN + CORPUS:
        assert ours.encode(text, add_special_tokens=False).ids == llama_cpp_ids(path, text), text


def test_pre_tokenizers_differ():
    """So that the test above tells one from another."""
    texts = odd_texts()
    splits = {pre: [PRE[pre]().pre_tokenize_str(text) for text in texts] for pre in PRE}
    assert all(splits[a] != splits[b] for a in PRE for b in PRE if a < b)


def test_tokens_that_fill_the_embeddings_up_are_none(tmp_path):
    """As in Qwen's files: added tokens behind the model's own, and more rows of embeddings than tokens."""
    theirs = byte_level("qwen2", bos=False)
    path = save(tmp_path, theirs, "qwen2", num_unused=50, eos="<|im_end|>")
    ours = load_tokenizer(path)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.decode([theirs.get_vocab_size() + 3]) == ""
    assert vocabulary_size(path) == theirs.get_vocab_size() + 50
    assert_same(ours, theirs)


def test_control_tokens_between_others_keep_their_ids(tmp_path):
    tokens = ["a", "<s>", "b", "<x>", "[PAD4]", "</s>"]
    kinds = np.array([1, 3, 1, 4, 5, 3])
    tokenizer = gguf_tokenizer(with_metadata(ggml__tokens=tokens, ggml__token_type=kinds, ggml__merges=None))
    assert tokenizer.encode("a<s>b<x></s>").ids == [0, 1, 2, 3, 5]


def scored(space: bool) -> tuple[Tokenizer, list[tuple[str, float, gguf.TokenType]]]:
    """As SentencePiece's: the reference has the merges that transformers derives from the scores."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([*CORPUS, *ODD] * 3, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    words = sorted(trained.get_vocab(), key=lambda word: (len(word) > 1, trained.get_vocab()[word]))
    tokens = [("<unk>", 0.0, gguf.TokenType.UNKNOWN)]
    tokens += [(each, 0.0, gguf.TokenType.CONTROL) for each in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    tokens += [(f"<0x{byte:02X}>", 0.0, gguf.TokenType.BYTE) for byte in range(256)]
    held = {token for token, _, _ in tokens}
    tokens += [(each, -float(at), gguf.TokenType.NORMAL) for at, each in enumerate(words) if each not in held]
    vocab = {token: index for index, (token, _, _) in enumerate(tokens)}
    scores = {token: score for token, score, kind in tokens if kind == gguf.TokenType.NORMAL}
    from transformers.convert_slow_tokenizer import generate_merges

    merges = generate_merges({token: vocab[token] for token in scores}, scores)
    reference = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    reference.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space else steps)
    special = [AddedToken(token, normalized=False, special=True) for token, _, kind in tokens[:5]]
    reference.add_special_tokens(special)
    reference.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return reference, tokens


def save_scored(
    folder: Path, tokens: list[tuple[str, float, gguf.TokenType]], *, space: bool, architecture: str = "llama"
) -> Path:
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([int(kind) for _, _, kind in tokens])
    writer.add_add_space_prefix(space)
    if space:  # else the same by default
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    return close(writer, folder)


@pytest.mark.parametrize("space", [True, False])
def test_sentencepiece_tokenizers(space, tmp_path):
    theirs, tokens = scored(space)
    ours = load_tokenizer(save_scored(tmp_path, tokens, space=space))
    assert len(ours.encode("the cat and the dog").ids) < 12, "there are merges"
    assert_same(ours, theirs)
    if space:
        phi_3 = load_tokenizer(save_scored(tmp_path, tokens, space=True, architecture="phi3"))
        found = {token.content: token.rstrip for token in phi_3.get_added_tokens_decoder().values()}
        assert found == {"<unk>": False, "<s>": False, "</s>": True, "<|im_start|>": True, "<|im_end|>": True}


def test_the_embedded_models_tokenizer_and_template(tmp_path):
    theirs = load_model_texts(EMBEDDED)
    raw = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    roles: dict[str, Any] = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "sep": "<sep>"}
    path = save(tmp_path, theirs.tokenizer, "gpt-2", add_bos=True, template=raw["chat_template"], **roles)
    ours = load_model_texts(path)
    assert_same(ours.tokenizer, theirs.tokenizer)
    assert ours.template == theirs.template == raw["chat_template"]
    assert ours.special_tokens == theirs.special_tokens
    assert gguf_end_ids(read_gguf(path)) == (2,)


def with_metadata(**changes: Any) -> GGUFFile:
    """A file's header as it would be read."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<|eot_id|>", "<|im_end|>", "</s>"],
        "tokenizer.ggml.token_type": np.array([1, 1, 1, 3, 1, 3]),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 5,
    }
    metadata |= {f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}
    return GGUFFile(Path("model.gguf"), {key: value for key, value in metadata.items() if value is not None}, {})


def test_every_control_token_that_ends_a_turn_ends_an_output():
    """A file names one; those that are no control tokens are text. ``<|end|>`` ends a message of gpt-oss alone."""
    assert gguf_end_ids(with_metadata()) == (3, 5)
    assert gguf_end_ids(with_metadata(ggml__eot_token_id=4)) == (3, 4, 5)
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>", "b", "</s>"]
    kinds = np.array([1, 3, 3, 3, 1, 1])
    harmony = {"ggml__token_type": kinds, "ggml__eos_token_id": 2}
    assert gguf_end_ids(with_metadata(ggml__tokens=tokens, **harmony)) == (2, 3)
    tokens[3] = "<|called|>"
    assert gguf_end_ids(with_metadata(ggml__tokens=tokens, **harmony)) == (1, 2)


@pytest.mark.parametrize(
    ("pre", "like"),
    [("refact", "smollm"), ("starcoder", "smollm"), ("command-r", "smollm"), ("glm4", "dbrx"), ("chatglm-bpe", "dbrx")],
)
def test_names_of_the_same_splitting(pre, like):
    """Granite, StarCoder, Command R and GLM have them; Command R's tokenizer composes characters too."""
    ours, known = (gguf_tokenizer(with_metadata(ggml__pre=each)) for each in (pre, like))
    assert ours.pre_tokenizer.__getstate__() == known.pre_tokenizer.__getstate__()
    assert (ours.normalizer is not None) == (pre == "command-r")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ggml__model": "t5"}, "ggml.model: got 't5'.*behind"),
        ({"ggml__model": "bert"}, "token_id.*UNK"),
        ({"ggml__model": None}, "ggml.model"),
        ({"ggml__pre": "chameleon"}, "ggml.pre: got 'chameleon', expected one of .*qwen2"),
        ({"ggml__pre": None}, "ggml.pre: got None"),
        ({"ggml__tokens": None}, "ggml.tokens"),
        ({"ggml__tokens": ["a"] * 6}, "each token once"),
        ({"ggml__merges": ["ab"]}, "two tokens"),
        ({"ggml__merges": ["a c"]}, "vocabulary"),
        ({"ggml__token_type": None, "ggml__eos_token_id": 6}, "below 6"),
        ({"ggml__add_bos_token": True}, "add_bos_token is true"),
        ({"ggml__add_bos_token": 3}, "add_bos_token"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, named):
    file = with_metadata(**changes)
    with pytest.raises(GGUFError, match=named):
        gguf_tokenizer(file)
        gguf_end_ids(file)
