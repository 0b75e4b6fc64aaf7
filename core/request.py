"""One user call and its sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from farsight.core.abilities import POOLINGS
from farsight.core.errors import InvalidValueError
from farsight.core.forecast import Forecast
from farsight.core.images import ImageSpan, check_spans


class SequenceStatus(IntEnum):
    """Life of a sequence, ordered: everything from ``FINISHED_STOPPED`` on is terminal."""

    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    OFFLOADED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_FAILED = 7

    @property
    def finish_reason(self) -> str | None:
        """The OpenAI ``finish_reason``; ``None`` while the sequence lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_FAILED: "error",
}


class Fault(IntEnum):
    """Cause of a sequence's failure, which tells the client what to do.

    ``SERVICE``: something broke; the same request may succeed later. ``REQUEST``: its own parameters leave no token to
    choose. ``MODEL``: the model computes logits for it that no token can be chosen from; it will again.
    """

    SERVICE = 0
    REQUEST = 1
    MODEL = 2


class Residency(IntEnum):
    """Where KV lies: a stopped sequence's on the device or the host, a cached block also on a disk."""

    DEVICE = 0
    HOST = 1
    DISK = 2


def _require(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidValueError(field, value, expected)


FLEX = 1 << 32
"""Added to the priority of a request that takes only the capacity that others leave: a class below all priorities that
a client can send."""


def is_flex(priority: int) -> bool:
    """Returns whether requests of this priority take only the capacity that others leave."""
    return priority >= FLEX >> 1


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of a client's stream, in seconds; infinity for no target.

    Attributes:
        ttft_s: From the receipt to the first token.
        tpot_s: Between two tokens after the first, in the mean.

    Raises:
        InvalidValueError: A number is not positive.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        _require(self.ttft_s > 0, "slo.ttft", self.ttft_s, "a number of seconds > 0")
        _require(self.tpot_s > 0, "slo.tpot", self.tpot_s, "a number of seconds > 0")


NO_SLO = Slo()
_LEAST_S = 1e-3

_LARGEST_BIAS = 1e30
"""A bound well inside the range of float32, the type of logits."""


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """Most tokens that an output may reason with before it answers.

    Attributes:
        num_tokens: Tokens of reasoning, after which ``end`` is forced.
        begin: Tokens that begin the reasoning; empty where the prompt has begun it.
        end: Tokens that end it.
    """

    num_tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(self.num_tokens >= 0, "thinking_token_budget", self.num_tokens, "an integer >= 0")
        _require(bool(self.end), "thinking_token_budget", self.num_tokens, "none where no token ends the reasoning")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a sequence ends.

    Attributes:
        max_new_tokens: Most output tokens; at least 1.
        temperature: 0 means greedy.
        top_p: Keep the smallest set of tokens whose mass reaches this; in (0, 1].
        top_k: Keep this many tokens; 0 keeps all.
        seed: Sampling is a function of (seed, position) alone, so it survives preemption.
        stop: Strings that end the output; not part of it.
        stop_token_ids: Token ids that end the output, beside the model's own EOS.
        ignore_eos: Go on after the model's own EOS.
        min_p: Drop tokens less likely than this share of the likeliest one; in [0, 1], 0 drops none.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens that prompt or output
            hold; in [0.01, 100], 1 changes nothing.
        presence_penalty: Subtracted from the logits of tokens that the output holds; in [-2, 2].
        frequency_penalty: Subtracted from a token's logit once for each time that the output holds it; in [-2, 2].
        logit_bias: (token id, what is added to its logit); each id once.
        min_tokens: The output ends with token ``min_tokens + 1`` at the earliest, unless a limit of length ends it.
        logprobs: Log probabilities (of the model's own distribution) of each token and of so many likeliest ones;
            None for none at all.
        prompt_logprobs: The same for the prompt's tokens, the first aside. Needs ``logprobs``, and that all of the
            prompt is computed: nothing of it may come from a cache.
        allowed_token_ids: The only tokens that may be chosen; empty for all.
        bad_words: Token ids of texts that the output must not hold.
        shown_ids: Special tokens whose texts are part of the output's text, such as those that frame tool calls.
        pooling: Result from the hidden states of its prompt (``POOLINGS``), in place of tokens; empty if it generates.
            Such a request is a prefill alone: its one step that would draw a token ends it.
        second_at: Index in the prompt of the first token of the second of two texts that a classifier reads at once;
            0 for one text.
        grammar: Grammar that the output must follow, as ``tokenization.grammars.sources`` writes it; empty for none.
        reasoning: Most tokens of its reasoning; None for no limit.
        benchmark_len: The output ends here as if by EOS, and EOS does not end it before; for benchmarks. Only the code
            that samples may read it: a scheduler that did would know what no scheduler can.
        looks_back: Derived: the choice of a token needs the tokens before it.
        plain: Derived: the likeliest token is taken as it is, and nothing more is to be known about it.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    benchmark_len: int | None = None
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    shown_ids: tuple[int, ...] = ()
    pooling: str = ""
    second_at: int = 0
    reasoning: ReasoningBudget | None = None
    looks_back: bool = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_tokens", self.max_new_tokens, "an integer >= 1")
        ok = math.isfinite(self.temperature) and self.temperature >= 0
        _require(ok, "temperature", self.temperature, "a finite number >= 0")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "a number > 0 and <= 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0 keeps all tokens)")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "an integer from 0 to 2**64 - 1")
        _require(all(self.stop), "stop", self.stop, "non-empty strings")
        self._check_penalties()
        self._check_lengths()
        ok = self.logprobs is None or self.logprobs >= 0
        _require(ok, "logprobs", self.logprobs, "an integer >= 0, or none")
        ok = self.logprobs is not None or not self.prompt_logprobs
        _require(ok, "prompt_logprobs", self.prompt_logprobs, "false where there are no logprobs")
        ok = not (self.grammar and (self.ignore_eos or self.benchmark_len is not None))
        _require(ok, "ignore_eos", True, "false where the output follows a grammar: EOS ends it")
        self._check_pooling()
        looks_back = self.adjusts or self.is_followed
        object.__setattr__(self, "looks_back", looks_back)
        plain = self.greedy and not looks_back and self.logprobs is None
        object.__setattr__(self, "plain", plain)

    def _check_penalties(self) -> None:
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "a number from 0 to 1")
        ok = 0.01 <= self.repetition_penalty <= 100
        _require(ok, "repetition_penalty", self.repetition_penalty, "a number from 0.01 to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, name, value, "a number from -2 to 2")
        ok = all(token_id >= 0 and -_LARGEST_BIAS <= bias <= _LARGEST_BIAS for token_id, bias in self.logit_bias)
        _require(ok, "logit_bias", self.logit_bias, "token ids >= 0 with numbers from -1e30 to 1e30")

    def _check_pooling(self) -> None:
        _require(self.pooling in POOLINGS, "pooling", self.pooling, f"one of {', '.join(filter(None, POOLINGS))}")
        ok = not self.pooling or self.max_new_tokens == 1
        _require(ok, "max_tokens", self.max_new_tokens, "1 where nothing is generated: the step that ends the prompt")
        _require(self.second_at >= 0, "second_at", self.second_at, "an integer >= 0")

    def check_vocabulary(self, vocab_size: int) -> None:
        """
        Raises:
            InvalidValueError: a token id that the model does not have.
        """
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        for token_id, _ in self.logit_bias:
            _require(token_id < vocab_size, "logit_bias", token_id, f"token ids from 0 to {vocab_size - 1}")
        if self.reasoning is not None:
            check_token_ids("thinking_token_budget", self.reasoning.begin + self.reasoning.end, vocab_size)

    def _check_lengths(self) -> None:
        ok = 0 <= self.min_tokens <= self.max_new_tokens
        _require(ok, "min_tokens", self.min_tokens, f"an integer from 0 to max_tokens = {self.max_new_tokens}")
        ok = self.benchmark_len is None or self.benchmark_len >= 1
        _require(ok, "benchmark_len", self.benchmark_len, "an integer >= 1")

    @property
    def own_engine_field(self) -> str:
        """Name of a set field that other servers cannot serve, since their replies lack what it needs; empty if none
        is.
        """
        if self.logprobs is not None:
            return "logprobs"
        if self.grammar:
            return "structured_outputs"
        if self.reasoning is not None:
            return "thinking_token_budget"
        if self.pooling:
            return "pooling"
        return "" if self.benchmark_len is None else "benchmark_len"

    @property
    def computes_prompt(self) -> bool:
        """Whether it needs every position of its prompt computed: nothing of it may come from a cache."""
        return self.prompt_logprobs or self.pooling == "mean"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen, greedily or not."""
        restricts = bool(self.allowed_token_ids or self.bad_words)
        return self.penalizes or bool(self.logit_bias) or self.min_tokens > 0 or restricts

    @property
    def is_followed(self) -> bool:
        """Whether the output so far says which tokens may come next."""
        return bool(self.grammar) or self.reasoning is not None

    @property
    def eos_ends(self) -> bool:
        """Whether the model's own EOS ends the output."""
        return not self.ignore_eos and self.benchmark_len is None


@dataclass(frozen=True, slots=True)
class Origin:
    """The answer that a request is a part of, as its client knows it.

    Attributes:
        response_id: ``id`` of the answer; an answer of several choices has several requests.
        choice: Index of the choice, from 0.
        owner: Salted hash of the API key that it was sent with; empty if there was none.
        traceparent: W3C trace context for servers that the request is passed on to; empty if it has no span.
    """

    response_id: str
    choice: int = 0
    owner: bytes = b""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A prompt as its client wrote it, for servers that take no token ids.

    Attributes:
        text: Prompt of a completion; empty if it is a chat.
        messages: (role, content) of each message of a chat.
    """

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One user call as the scheduler and the worker see it.

    Attributes:
        request_id: Unique name given by the ingress.
        attempt: Raised by the ingress on each resubmission; workers fence lower ones.
        ingress_id: Which ingress replica holds the client; tokens go straight there.
        prompt_ids: Token ids; never empty.
        output_ids: Tokens that the client has from earlier attempts (a resumed request); usually empty.
        origin: Answer that it belongs to; None if its decisions need not be explained.
        priority: Lower goes first, whatever the policies say; from about ``FLEX`` on it takes what is left.
        deadline_s: Seconds after a scheduler gets it by which its last token is wanted; None for no such target.
        forecast: Forecast of the whole output length; None if it did not come in time.
        expected_cached_len: Prompt tokens that its replica is believed to have in its prefix cache.
        prefix_hashes: Chained hashes of the prompt's full blocks (``kvcache.block_manager``), made by the ingress;
            empty where placement does not look at prefixes, and for a request that can share none.
        cache_salt: Only requests of the same salt share cached prefixes.
        model_version: Version of the weights that it runs on, all its attempts alike.
        source: None where no replica asks for it (``[[replica]] prompt``), or the client sent token ids.
        tenant: Tenant charged for its steps; empty where no API keys are in use. Access control sets it, no client can.
        weight: Share of the tenant relative to the others'; > 0.
        slo: From when a scheduler gets the request, as ``deadline_s``.
        images: The images among its prompt's tokens, in their order.
        reading_rate: Tokens a second that its client reads of a stream as they come; 0 for the server's usual rate
            (``[scheduler] reading_rate``); None where no one reads before the end.
        session: The conversation that its client says it is a turn of; empty where the client does not say.
        continues: Id of the earlier answer that its client says it goes on from; empty where the client does not say.
        application: The program that its client says it is, for sums; empty where the client does not say.
    """

    request_id: str
    attempt: int
    ingress_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()
    origin: Origin | None = None
    priority: int = 0
    deadline_s: float | None = None
    forecast: Forecast | None = None
    expected_cached_len: int = 0
    prefix_hashes: tuple[int, ...] = ()
    cache_salt: str = ""
    source: PromptSource | None = None
    tenant: str = ""
    weight: float = 1.0
    model_version: int = 0
    slo: Slo = NO_SLO
    images: tuple[ImageSpan, ...] = ()
    reading_rate: float | None = None
    session: str = ""
    continues: str = ""
    application: str = ""

    def __post_init__(self) -> None:
        if self.images:
            check_spans(self.images, len(self.prompt_ids))
        _require(len(self.prompt_ids) > 0, "prompt", self.prompt_ids, "at least one token")
        ok = len(self.output_ids) < self.sampling.max_new_tokens
        _require(ok, "output_ids", len(self.output_ids), f"fewer than max_tokens = {self.sampling.max_new_tokens}")
        ok = self.deadline_s is None or (math.isfinite(self.deadline_s) and self.deadline_s >= 0)
        _require(ok, "deadline_s", self.deadline_s, "a finite number >= 0, or none")
        _require(0 < self.weight < math.inf, "weight", self.weight, "a finite number > 0")
        ok = self.reading_rate is None or 0 <= self.reading_rate < math.inf
        _require(ok, "reading_rate", self.reading_rate, "a finite number of tokens a second >= 0, or none")

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def own_engine_field(self) -> str:
        """As ``SamplingParams.own_engine_field``, of all that it asks."""
        return "images" if self.images else self.sampling.own_engine_field

    @property
    def prefill_only(self) -> bool:
        """Whether it ends with its prompt and generates nothing."""
        return bool(self.sampling.pooling)

    @property
    def known_len(self) -> int:
        """Tokens known when the attempt begins: prompt and resumed output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_total_len(self) -> int:
        """Prompt and output together, in tokens, at most."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens

    @property
    def wants_speed(self) -> bool:
        """Whether its client has said by when it wants tokens."""
        return self.deadline_s is not None or self.slo is not NO_SLO

    def aged(self, age_s: float) -> Request:
        """Returns the request ``age_s`` seconds after its receipt: with what is left of its client's targets."""
        if not self.wants_speed:
            return self
        deadline_s = None if self.deadline_s is None else max(0.0, self.deadline_s - age_s)
        slo = Slo(max(_LEAST_S, self.slo.ttft_s - age_s), self.slo.tpot_s)
        return replace(self, deadline_s=deadline_s, slo=slo)

    @property
    def all_by_s(self) -> float:
        """Seconds by which all of it has to be there, where it is returned as a whole; infinity for any time."""
        return min(math.inf if self.deadline_s is None else self.deadline_s, self.slo.ttft_s)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """
    Raises:
        InvalidValueError: An id that is not below ``vocab_size``, or is negative; names the first.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise InvalidValueError(f"{field}[{index}]", token_ids[index], f"a token id from 0 to {vocab_size - 1}")
