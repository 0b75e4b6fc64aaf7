"""Small tokenizers of the kinds that models come with, each with control tokens of its own."""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the cat and the dog say hello world, hello there",
    "a user asks the system; the assistant answers user and system",
    "naïve 日本語 text with <b>tags</b> and code [x] | y = <z>",
]
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>")
"""Not declared special, as in some models."""


def _add(trained: Tokenizer, rstrip: bool = False) -> Tokenizer:
    """With the added tokens; trainers know no other than special ones."""
    tokenizer = Tokenizer.from_str(json.dumps({**json.loads(trained.to_str()), "added_tokens": []}))
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in SPECIAL[:3]])
    marks = [AddedToken(each, normalized=False, special=True, rstrip=rstrip) for each in SPECIAL[3:]]
    tokenizer.add_special_tokens(marks)
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in MARKERS])
    return tokenizer


def byte_level(rstrip: bool = False) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen, with a run of spaces that is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer = _add(tokenizer, rstrip)
    tokenizer.add_tokens([AddedToken("    ", normalized=True)])
    single = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), single])
    return tokenizer


def byte_level_rstrip() -> Tokenizer:
    """As Phi-3's markers, which take in the spaces after them."""
    return byte_level(rstrip=True)


def _byte_fallback(rstrip: bool) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256))]
    words += sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _add(tokenizer, rstrip)


def llama_2() -> Tokenizer:
    """A space before every section of text, and bytes for what the vocabulary lacks."""
    tokenizer = _byte_fallback(rstrip=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def metaspace_first() -> Tokenizer:
    """A space before the very beginning of a text alone."""
    tokenizer = _byte_fallback(rstrip=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def unigram() -> Tokenizer:
    """As T5: control tokens are components of the model too, and compatible characters are made the same."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=[*SPECIAL, *MARKERS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _add(tokenizer)


def word_component() -> Tokenizer:
    """As BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=[*SPECIAL, *MARKERS], show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, " ".join("abcdefghijklmnopqrstuvwxyz<>|/_")], trainer)
    return _add(tokenizer)


def word_level() -> Tokenizer:
    """Whole words between spaces; control tokens are words of the model too."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=[*SPECIAL, *MARKERS], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _add(tokenizer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    each.__name__: each
    for each in (byte_level, byte_level_rstrip, llama_2, metaspace_first, unigram, word_component, word_level)
}
