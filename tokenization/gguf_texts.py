"""The tokenizer, the special tokens and the chat templates of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from farsight.tokenization.gguf_file import GGUFError, GGUFFile

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ADDED = (_CONTROL, _USER_DEFINED, _UNKNOWN)
_MAX_TOKEN = 256
"""Longest token, in characters, that merges are looked for in; SentencePiece's own limit is 16, or set by training."""

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_ROLE_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # the misspelling is the format's
_SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}
"""Ids where a file does not say, as in llama.cpp."""

_SPACED = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's control tokens that leave the spaces behind them alone."""

_ENDS = ("eos", "eot", "eom")
_END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
        *("<turn|>", "<|tool_response>"),  # Gemma 4's
    )
)
"""Added tokens that end an output wherever they are in a vocabulary, as in llama.cpp: one file names a single eos."""

_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
"""In a vocabulary that has both, as gpt-oss's, they end an output, and ``<|end|>`` ends one of its messages."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"

_GPT2 = frozenset(("gpt-2", "gpt2"))
_COMPOSED = frozenset(("qwen2", "qwen35", "command-r"))
"""Where characters and their marks become one character first, which llama.cpp leaves out."""

_SINGLE_DIGITS = frozenset(("smollm", "starcoder", "refact", "command-r"))
_LLAMA3 = frozenset(("llama-bpe", "llama3", "llama-v3", "lfm2"))
_SPLITS = {
    **dict.fromkeys(
        (*_LLAMA3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), rf"{_WORDS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), rf"{_WORDS}|{_LETTERS}|\p{{N}}|{_REST}"),
    "qwen35": rf"{_WORDS}|{_MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "tekken": rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}",
    "gpt-4o": rf"{_CASED[0]}{_WORDS}?|{_CASED[1]}{_WORDS}?|\p{{N}}{{1,3}}|{_CASED_REST}",
}
"""By ``tokenizer.ggml.pre``: the expression that splits a text before the merges, as the models' own tokenizers do."""

_WHOLE_WORDS = _LLAMA3 | {"tekken"}
"""Where a word that is a token is that token, whatever the merges say; and where a text begins with bos by default."""


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer that the metadata describes.

    Raises:
        GGUFError: There is none, or one of a kind that is not built.
    """
    kind = file.value(_KEY + "model", str)
    tokens = _tokens(file)
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(file, tokens)
        elif kind in ("llama", "gemma4"):
            tokenizer = _sentencepiece(file, tokens)
        elif kind == "bert":
            tokenizer, tokens = _word_pieces(file, tokens)
        else:
            advice = "serve the model's own directory with its tokenizer.json, or llama.cpp's server behind [[replica]]"
            raise file.error(_KEY + "model", kind, f"gpt2, llama, gemma4 or bert: {advice}")
        _add_special(tokenizer, file, tokens)
        if kind == "bert":
            tokenizer.post_processor = _pairs(file, list(tokens))
        else:
            tokenizer.post_processor = _post_processor(file, list(tokens))
        return tokenizer
    except GGUFError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise file.error(_KEY + "tokens", str(error), "a vocabulary that fits its merges") from error


def gguf_special_tokens(file: GGUFFile) -> dict[str, str]:
    """``bos_token`` and its like, as a ``tokenizer_config.json`` names them."""
    tokens = file.strings(_KEY + "tokens")
    ids = {role: _role(file, role, len(tokens)) for role in _ROLES}
    return {f"{role}_token": tokens[each] for role, each in ids.items() if each is not None}


def gguf_templates(file: GGUFFile) -> dict[str, str]:
    """Sources of chat templates by name; the one for plain chats is ``default``."""
    prefix = "tokenizer.chat_template"
    found = {key: value for key, value in file.metadata.items() if key.startswith(prefix) and isinstance(value, str)}
    return {key.removeprefix(prefix).removeprefix(".") or "default": value for key, value in found.items()}


def gguf_end_ids(file: GGUFFile) -> tuple[int, ...]:
    """Tokens that end an output: eos, the end of a turn, and the control tokens known to end one."""
    tokens = file.strings(_KEY + "tokens")
    named = {_role(file, role, len(tokens)) for role in _ENDS} - {None}
    kinds = enumerate(_kinds(file, len(tokens)))
    control = (index for index, kind in kinds if kind in (_CONTROL, _USER_DEFINED))
    texts = _END_TEXTS
    if set(tokens) >= _HARMONY_ENDS:
        texts = (_END_TEXTS | _HARMONY_ENDS) - {"<|end|>"}
    ends = {index for index in control if tokens[index] in texts}
    return tuple(sorted(each for each in named | ends if each is not None))


def vocabulary_len(file: GGUFFile) -> int:
    """Number of tokens."""
    return len(file.strings(_KEY + "tokens"))


def _tokens(file: GGUFFile) -> dict[str, int]:
    tokens = file.strings(_KEY + "tokens")
    ids = {token: index for index, token in enumerate(tokens)}
    if not tokens:
        raise file.error(_KEY + "tokens", "nothing", "the vocabulary: convert the model with its tokenizer")
    if len(ids) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise file.error(_KEY + "tokens", twice, "each token once")
    return ids


def _kinds(file: GGUFFile, length: int) -> list[int]:
    return file.numbers(_KEY + "token_type", length, _NORMAL)


def _role(file: GGUFFile, role: str, num_tokens: int) -> int | None:
    key = f"{_KEY}{_ROLE_KEYS.get(role, role)}_token_id"
    default = _SENTENCEPIECE_IDS.get(role) if file.metadata.get(_KEY + "model") == "llama" else None
    found: int | None = file.value(key, int, default)
    if found is not None and not 0 <= found < num_tokens:
        raise file.error(key, found, f"an id below {num_tokens}")
    return found


def _byte_level(file: GGUFFile, ids: dict[str, int]) -> Tokenizer:
    """As GPT-2's: characters stand for bytes, merges in their order."""
    pre = file.value(_KEY + "pre", str)
    merges = [_parted(file, merge) for merge in file.strings(_KEY + "merges")]
    tokenizer = Tokenizer(models.BPE(_own(file, ids), merges, ignore_merges=pre in _WHOLE_WORDS))
    tokenizer.normalizer = normalizers.NFC() if pre in _COMPOSED else None
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _own(file: GGUFFile, ids: dict[str, int]) -> dict[str, int]:
    """The tokens of the model itself: without those that follow them, which are added or only fill the embeddings up.

    So it is in a ``tokenizer.json``. Where added tokens stand between others, all tokens are the model's.
    """
    kinds = _kinds(file, len(ids))
    end = 1 + max((index for index, kind in enumerate(kinds) if kind not in (*_ADDED, _UNUSED)), default=-1)
    last = 1 + max((index for index, kind in enumerate(kinds) if kind in _ADDED), default=-1)
    has_holes = _UNUSED in kinds[end:last] or "" in ids
    return ids if has_holes else {token: index for token, index in ids.items() if index < end}


def _parted(file: GGUFFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise file.error(_KEY + "merges", merge, "two tokens with a space between")
    return left, right


def _pre_tokenizer(file: GGUFFile, pre: str | None) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        return words
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated", invert=False)
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, plain])
    known = ", ".join(sorted(_GPT2 | _SINGLE_DIGITS | _SPLITS.keys()))
    advice = f"one of {known}: serve the model's own directory, or llama.cpp's server behind [[replica]]"
    raise file.error(_KEY + "pre", pre, advice)


def _sentencepiece(file: GGUFFile, ids: dict[str, int]) -> Tokenizer:
    """Makes one as Llama 2's: spaces are characters, the best score merges first, bytes stand for what is missing.

    Gemma 4's file lists the merges.
    """
    unknown = _role(file, "unk", len(ids))
    name = None if unknown is None else list(ids)[unknown]
    listed = [_parted(file, merge) for merge in file.strings(_KEY + "merges")]
    bpe = models.BPE(ids, listed or _merges(file, ids), unk_token=name, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    space = file.value(_KEY + "add_space_prefix", bool, True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space else steps)
    return tokenizer


def _word_pieces(file: GGUFFile, ids: dict[str, int]) -> tuple[Tokenizer, dict[str, int]]:
    """Builds one as BERT's, with its vocabulary: the file marks beginnings of words, the model what continues one."""
    kinds = _kinds(file, len(ids))
    own: dict[str, int] = {}
    for token, index in ids.items():
        starts, special = token.startswith("▁"), kinds[index] in (_CONTROL, _UNKNOWN)
        own[token if special else token[1:] if starts else "##" + token] = index
    # A vocabulary without capitals belongs to a model that reads none; no key says so.
    cased = any(token.isascii() and token.lower() != token for token, i in own.items() if kinds[i] == _NORMAL)
    unknown = _text(file, "unk", list(own), "[UNK]")
    tokenizer = Tokenizer(models.WordPiece(own, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, own


def _pairs(file: GGUFFile, tokens: Sequence[str]) -> processors.PostProcessor:
    """Puts around a text, and between two, what BERT reads there."""
    first, end = _text(file, "cls", tokens, "[CLS]"), _text(file, "sep", tokens, "[SEP]")
    return processors.BertProcessing((end, tokens.index(end)), (first, tokens.index(first)))


def _text(file: GGUFFile, role: str, tokens: Sequence[str], default: str) -> str:
    found = _role(file, role, len(tokens))
    if found is None and default not in tokens:
        raise file.error(f"{_KEY}{_ROLE_KEYS.get(role, role)}_token_id", "nothing", f"an id, or the token {default}")
    return default if found is None else tokens[found]


def _merges(file: GGUFFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Each way to make a token of two others, as ``transformers`` orders them: by score, then by their lengths."""
    scores = np.array(file.numbers(_KEY + "scores", len(ids), 0.0))
    kinds = _kinds(file, len(ids))
    known = {token: index for token, index in ids.items() if kinds[index] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    found: list[tuple[int, int]] = []
    for token, index in known.items():
        if len(token) > _MAX_TOKEN:
            raise file.error(_KEY + "tokens", token, f"tokens of at most {_MAX_TOKEN} characters")
        found += [(index, cut) for cut in range(1, len(token)) if token[:cut] in known and token[cut:] in known]
    tokens = list(ids)
    owner, left = np.array(found, dtype=np.int64).reshape(-1, 2).T
    right = np.fromiter(map(len, tokens), np.int64)[owner] - left
    best_first = np.lexsort((-right, -left, -scores[owner])).tolist()
    return [(tokens[index][:cut], tokens[index][cut:]) for index, cut in map(found.__getitem__, best_first)]


def _add_special(tokenizer: Tokenizer, file: GGUFFile, ids: dict[str, int]) -> None:
    """Control tokens and tokens that the model's author added, which a text is searched for before anything else."""
    kinds = _kinds(file, len(ids))
    wanted = {token: index for token, index in ids.items() if kinds[index] in _ADDED and token}
    absorbing = _absorbs_spaces(file)
    # In one call: each call builds the search for all added tokens again, and Gemma has 6,400.
    tokenizer.add_tokens(
        [_added_token(token, kinds[index] != _USER_DEFINED, absorbing) for token, index in wanted.items()]
    )
    wrong = next((token for token, index in wanted.items() if tokenizer.token_to_id(token) != index), None)
    if wrong is not None:
        raise file.error(_KEY + "tokens", wrong, f"a token that keeps its id, {wanted[wrong]}")


def _added_token(token: str, special: bool, absorbing: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special, rstrip=special and absorbing and token not in _SPACED)


def _absorbs_spaces(file: GGUFFile) -> bool:
    """Whether control tokens take in the spaces behind them: Phi-3's do, and the format has no field for it."""
    return file.metadata.get("general.architecture") == "phi3" and file.metadata.get(_KEY + "model") == "llama"


def _post_processor(file: GGUFFile, tokens: Sequence[str]) -> processors.PostProcessor | None:
    """What puts bos before a text and eos behind it, where the file says so."""
    begins = file.value(_KEY + "model", str) == "llama" or file.value(_KEY + "pre", str) in _WHOLE_WORDS
    before = _around(file, "bos", tokens, default=begins)
    after = _around(file, "eos", tokens, default=False)
    if not before and not after:
        return None
    named = [(tokens[each], each) for each in {*before, *after}]
    whole = [*(tokens[each] for each in before), "$A", *(tokens[each] for each in after)]
    return processors.TemplateProcessing(single=whole, special_tokens=named)


def _around(file: GGUFFile, role: str, tokens: Sequence[str], *, default: bool) -> list[int]:
    found = _role(file, role, len(tokens))
    asked = file.value(f"{_KEY}add_{role}_token", bool)
    if asked and found is None:
        raise file.error(f"{_KEY}{role}_token_id", "nothing", f"an id, as add_{role}_token is true")
    return [found] if found is not None and (default if asked is None else asked) else []
