"""Token ids of a text that is in part a client's: what the client wrote never becomes a control token.

A text in which the tokenizer finds no control token that touches the client's part is encoded as it is, so ordinary
text has the ids that ``transformers`` gives it. Otherwise the control tokens outside the client's part are replaced by
names that no client can guess, and the text is encoded by a twin of the tokenizer that knows the control tokens by
those names alone. ADR 31 has the reasons.
"""

from __future__ import annotations

import bisect
import itertools
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, models

from farsight.core.errors import InvalidValueError
from farsight.tokenization.loading import is_panic

Span = tuple[int, int]
"""Begin and end of a part of a text, in characters."""

Ids = tuple[int, ...]

_BYTE_TOKEN = "<0x"
"""How tokens begin that stand for a byte."""

_UNKNOWN = "\U000f1234"
"""A character for private use, which no vocabulary has."""

_LONG_CHARS = 4096
"""A text of so many characters is tokenised in more than about a millisecond."""

_FILL = "\ufffc"
"""Stands for the client's characters while the other control tokens are looked for."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text.

    Attributes:
        offsets: By token, the character of the text that it begins with; a token that the tokenizer adds by itself
            has the offset of the token after it.
    """

    ids: tuple[int, ...]
    offsets: Callable[[], tuple[int, ...]]


class PlainTextEncoder:
    """Encodes texts with one tokenizer.

    Args:
        control: Ids of the added tokens that only the server's own part of a text may hold.
    """

    def __init__(self, tokenizer: Tokenizer, control: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._control = frozenset(control)
        self._unknown = _unknown_token(tokenizer)
        self._unknown_id = None if self._unknown is None else tokenizer.token_to_id(self._unknown)
        self._known_control = self._control - {self._unknown_id}
        self._prefix, self._suffix = _added_by_itself(tokenizer)
        self._twin = _Twin(tokenizer, self._control, _model_without(tokenizer, self._known_control))

    def encode(self, text: str, client: Sequence[Span], *, add_special_tokens: bool = False) -> EncodedText:
        """Token ids of ``text``.

        Args:
            client: The parts of the text that are the client's, in order and apart.
            add_special_tokens: Whether the tokenizer puts tokens such as ``<s>`` around the text.

        Raises:
            InvalidValueError: The tokenizer's own regular expressions try too much on this text.
        """
        encoding = _encode(self._tokenizer, text, add_special_tokens)
        ids = encoding.ids
        if client and self._reaches(encoding, ids, text, client):
            encoding, ids = self._guarded(text, client)
            if add_special_tokens:
                return _surrounded(self._prefix, ids, encoding, self._suffix)
        return EncodedText(tuple(ids), lambda: _begins(encoding.offsets))

    def _reaches(self, encoding: Encoding, ids: list[int], text: str, client: Sequence[Span]) -> bool:
        """Whether a control token contains a character of the client's, apart from spaces beside the token."""
        ends = [end for _, end in client]
        for _, (begin, end) in self._control_spans(encoding, ids, text):
            index = bisect.bisect_right(ends, begin)
            if index < len(client) and client[index][0] < end:
                return True
        return False

    def _control_spans(self, encoding: Encoding, ids: list[int], text: str) -> Iterator[tuple[int, Span]]:
        """Control tokens that stand in the text, each with its place."""
        control = self._control
        if self._unknown is not None and self._unknown not in text:
            control = self._known_control  # a text may hold many characters that the model does not know
        for index in itertools.compress(range(len(ids)), map(control.__contains__, ids)):
            span = encoding.token_to_chars(index)
            if span is None or span[0] == span[1]:
                continue  # put there by the tokenizer itself
            begin, end = _core(text, span)
            if ids[index] == self._unknown_id and text[begin:end] != self._unknown:
                continue  # a character that the model does not know
            yield ids[index], (begin, end)

    def _guarded(self, text: str, client: Sequence[Span]) -> tuple[Encoding, list[int]]:
        """The ids by the twin, without those that the tokenizer adds by itself."""
        twin = self._twin
        encoding = _encode(twin.tokenizer, twin.rename(text, self._trusted(text, client)))
        known = twin.ids
        return encoding, [known.get(each, each) for each in encoding.ids]

    def _trusted(self, text: str, client: Sequence[Span]) -> list[tuple[int, Span]]:
        """The control tokens outside the client's parts: those that are found where those parts are filled."""
        parts = []
        at = 0
        for begin, end in client:
            filled = "".join(char if char.isspace() else _FILL for char in text[begin:end])
            parts += [text[at:begin], filled]
            at = end
        filled_text = "".join([*parts, text[at:]])
        encoding = _encode(self._tokenizer, filled_text)
        return list(self._control_spans(encoding, encoding.ids, filled_text))


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> Encoding:
    """As ``Tokenizer.encode``, which holds the interpreter's lock meanwhile; ``encode_batch`` does not.

    Raises:
        InvalidValueError: The tokenizer's own regular expressions try too much on this text.
    """
    try:
        if len(text) < _LONG_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:
        if not is_panic(error):
            raise
        raise InvalidValueError("prompt", text, f"a text that the model's tokenizer can encode ({error})") from None


class _Twin:
    """A tokenizer that knows the control tokens by other names.

    Attributes:
        ids: From its ids of added tokens to the ids that they stand for.
    """

    def __init__(self, tokenizer: Tokenizer, control: Collection[int], model: Any) -> None:
        self.tokenizer = twin = Tokenizer(model)
        twin.normalizer = tokenizer.normalizer
        twin.pre_tokenizer = tokenizer.pre_tokenizer
        twin.post_processor = tokenizer.post_processor
        self._secret = secrets.token_hex(16)
        self._reserve_ids()
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        names = [self._name(token_id) if token_id in control else token.content for token_id, token in added]
        # In one call: each call builds the search for all added tokens again, and Gemma has 6,400.
        twin.add_tokens([_renamed(token, name) for (_, token), name in zip(added, names, strict=True)])
        own_ids = map(twin.token_to_id, names)
        self.ids = {own: token_id for own, (token_id, _) in zip(own_ids, added, strict=True) if own is not None}

    def rename(self, text: str, tokens: Sequence[tuple[int, Span]]) -> str:
        """The text with the other names in place of the tokens."""
        parts = []
        at = 0
        for token_id, (begin, end) in tokens:
            parts += [text[at:begin], self._name(token_id)]
            at = end
        return "".join([*parts, text[at:]])

    def _name(self, token_id: int) -> str:
        """A name of the same length for every id, of characters that no normalizer changes or joins with neighbours."""
        return f"0{self._secret}{token_id:010d}0"

    def _reserve_ids(self) -> None:
        """Lets new ids begin after the model's, which may have holes: the library counts from their number."""
        twin = self.tokenizer
        size = twin.get_vocab_size()
        highest = max(twin.get_vocab().values(), default=-1)
        if highest >= size:
            twin.add_tokens([f"0{self._secret}r{index}0" for index in range(size, highest + 1)])


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized
    )


def _model_without(tokenizer: Tokenizer, control: Collection[int]) -> Any:
    """The tokenizer's model with other names for its own control tokens, so that no text is encoded as one of them."""
    model = tokenizer.model
    names_of = {each: model.id_to_token(each) for each in control}
    secret = secrets.token_hex(16)
    names = {name: f"0{secret}n{each}0" for each, name in names_of.items() if name is not None}
    if not any(_may_make(model, name) for name in names):
        return model
    settings = json.loads(tokenizer.to_str())
    renamed = settings["model"]
    if isinstance(renamed["vocab"], list):
        renamed["vocab"] = [[names.get(component, component), score] for component, score in renamed["vocab"]]
    else:
        renamed["vocab"] = {names.get(component, component): each for component, each in renamed["vocab"].items()}
    if "merges" in renamed:
        renamed["merges"] = [merge for merge in renamed["merges"] if not _makes(merge, names)]
    return Tokenizer.from_str(json.dumps({**settings, "added_tokens": [], "post_processor": None})).model


def _may_make(model: Any, name: str) -> bool:
    """Returns whether the model may make the token of this name out of some text.

    Byte pairs make a token inside of a text only by the merges that make it of the text alone: any other merge there
    takes in a character beside it. So that text is tried, which spares most models a way through JSON: Gemma's takes
    seconds.
    """
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return True
    if _BYTE_TOKEN in name or (model.unk_token or _BYTE_TOKEN) in name:
        return True  # a part of it may be a token that stands for other characters
    return any(token.value == name for token in model.tokenize(name))


def _makes(merge: Sequence[str] | str, names: Collection[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _unknown_token(tokenizer: Tokenizer) -> str | None:
    """The token that the model uses for unknown characters, if it has one."""
    name: str | None = getattr(tokenizer.model, "unk_token", None)
    if name is not None:
        return name
    added = tokenizer.get_added_tokens_decoder()  # a Unigram model does not declare it: its output shows it
    found = [each for each in tokenizer.encode(_UNKNOWN, add_special_tokens=False).ids if each in added]
    return added[found[0]].content if found else None


def _added_by_itself(tokenizer: Tokenizer) -> tuple[Ids, Ids]:
    """The tokens that the tokenizer puts before and after a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    ids, mask = encoding.ids, encoding.special_tokens_mask
    first = next((index for index, is_special in enumerate(mask) if not is_special), len(ids))
    last = next((index for index in range(len(ids), first, -1) if not mask[index - 1]), first)
    return tuple(ids[:first]), tuple(ids[last:])


def _surrounded(prefix: Ids, ids: Sequence[int], encoding: Encoding, suffix: Ids) -> EncodedText:
    def offsets() -> tuple[int, ...]:
        return _begins([*((0, 0) for _ in prefix), *encoding.offsets, *((0, 0) for _ in suffix)])

    return EncodedText((*prefix, *ids, *suffix), offsets)


def _core(text: str, span: Span) -> Span:
    """The span without the spaces that a token with ``lstrip`` or ``rstrip`` has absorbed."""
    begin, end = span
    inner = text[begin:end]
    if not inner.strip():
        return span
    return begin + len(inner) - len(inner.lstrip()), end - (len(inner) - len(inner.rstrip()))


def _begins(offsets: Sequence[Span]) -> tuple[int, ...]:
    """Where each token begins: at the end of the one before it, unless they share a character."""
    found = []
    reached = 0
    for begin, end in offsets:
        found.append(reached if begin == end else min(begin, reached))
        reached = max(reached, end)
    return tuple(found)
