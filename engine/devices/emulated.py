"""A device that computes nothing: steps and copies take as long as a profile says, and the tokens are made up.

Its pools exist as numbers only, and its image encoder gives zeros.

So live scheduling can be measured at the pace of a device that is not there, without a model that takes the
processors from the schedulers, and with many replicas on one machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from farsight.core.config.engine import EngineConfig
from farsight.core.costs import ImageCost, StepCost
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.core.messages.tokens import TokenLogprobs
from farsight.core.request import Fault, Request, Residency
from farsight.engine.checkpoint.model_config import DecoderConfig, load_model_config
from farsight.engine.runner import Copies, Device, Runner, num_host_pool_blocks, num_pool_blocks
from farsight.engine.sequence import Detokenizer, Sequence
from farsight.engine.step_results import ItemLogprobs, IterationCutOff, LoggedTokens, NoToken
from farsight.engine.vision.geometry import ImageGeometry, PreparedImage, load_geometry
from farsight.estimator.profile_file import DeviceProfile, find_device_profile
from farsight.kvcache import KVCopy, StepBatch, StepItem
from farsight.kvcache.step_batch import step_work

LEAST_SHARE = 0.5
"""Least share of its time that a step takes, however late the host is."""

MAX_LATE_S = 1.0
"""A host that is later than this was not busy but held up; that delay is not made up for."""

_MASK = 2**64 - 1


class Pace:
    """Waits for instants.

    Args:
        clock: Seconds, monotonic.
        sleep: Waits for about so many seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.now = clock
        self._sleep = sleep

    def wait_until(self, instant: float) -> None:
        while (left_s := instant - self.now()) > 0:
            self._sleep(left_s)


class EmulatedRunner(Runner):
    """Steps that last as long as their predicted cost.

    While there is work, a step begins when the one before it was to end, not when the host has got round to it: what
    the bookkeeping took, by how much a sleep was too long and how long others had the processor do not add up, as on a
    device whose host prepares a step while it computes the last one. What is late is made good within the next steps,
    each of which takes ``LEAST_SHARE`` of its time at least.

    Args:
        token_ids: The tokens that outputs are made of.
    """

    def __init__(self, cost: StepCost, token_ids: list[int], pace: Pace | None = None) -> None:
        self._cost = cost
        self._token_ids = token_ids
        self._pace = pace or Pace()
        self._free_at = -math.inf

    def execute(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Returns a made-up token for each item that samples, when the step is over.

        Raises:
            IterationCutOff: It would have taken longer than ``batch.cut_off_s``.
        """
        whole_s = self._cost.step_s(*step_work(batch))
        step_s = min(whole_s, batch.cut_off_s)
        now = self._pace.now()
        if now - self._free_at > MAX_LATE_S:
            self._free_at = now
        self._free_at += step_s
        if step_s < whole_s:
            self._pace.wait_until(max(self._free_at, now + LEAST_SHARE * step_s))
            raise IterationCutOff
        tokens = [self._token(sequences[item.request_id]) if item.samples else None for item in batch.items]
        logprobs = _logprobs(batch, tokens, sequences)
        failures = _no_vectors(batch, tokens, sequences)
        self._pace.wait_until(max(self._free_at, now + LEAST_SHARE * step_s))
        return LoggedTokens(tokens, logprobs, failures) if logprobs or failures else tokens

    def rest(self) -> None:
        """Books that no step can run: the next step begins when it comes."""
        self._free_at = -math.inf

    def _token(self, sequence: Sequence) -> int:
        origin = token_hash(sequence.named_ids, sequence.request, sequence.output_len)
        return self._token_ids[origin % len(self._token_ids)]


def token_hash(named_ids: SequenceOf[int], request: Request, index: int) -> int:
    """Returns the origin of the output token of this index: the prompt's token in its place, and the seed if drawn.

    Nothing else: no batch, attempt or replica changes an answer. Two prompts of one length that differ in some tokens
    have answers that differ in as many places; tokens of unlike pictures differ.

    Args:
        named_ids: Names of its prompt's tokens at least (``core.images.identity_ids``).
    """
    sampling = request.sampling
    prompt_token = named_ids[index % len(request.prompt_ids)]
    seed = 0 if sampling.greedy else sampling.seed + 1
    return _mix(_mix(_mix(seed) + index) + prompt_token)


def _mix(x: int) -> int:
    """Mixes bits (Splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _logprobs(batch: StepBatch, tokens: list[int | None], sequences: Mapping[str, Sequence]) -> dict[int, ItemLogprobs]:
    """Returns log probabilities that clients ask for, by index of the item: each token was certain."""
    found = {}
    for i, (item, token) in enumerate(zip(batch.items, tokens, strict=True)):
        sequence = sequences[item.request_id]
        if sequence.sampling.logprobs is not None:
            output = None if token is None else _certain(token)
            found[i] = ItemLogprobs(output, _prompt_logprobs(item, sequence))
    return found


def _no_vectors(batch: StepBatch, tokens: list[int | None], sequences: Mapping[str, Sequence]) -> dict[int, NoToken]:
    """Fails the items that ask for embeddings, by their index; their tokens are taken out."""
    failures = {}
    for i, item in enumerate(batch.items):
        if item.samples and sequences[item.request_id].sampling.pooling:
            tokens[i] = None
            failures[i] = NoToken("an emulated device computes no embeddings", Fault.REQUEST)
    return failures


def _prompt_logprobs(item: StepItem, sequence: Sequence) -> list[TokenLogprobs]:
    """Returns log probabilities of the prompt's tokens that this item computes, if its client asked for them."""
    if sequence.prompt_logprobs is None:
        return []
    first = 1 + len(sequence.prompt_logprobs)  # nothing says how likely the first of all is
    end = min(item.start + item.num_tokens + 1, sequence.prompt_len)
    return [_certain(token) for token in sequence.token_ids[first:end]]


def _certain(token: int) -> TokenLogprobs:
    return (token,), (0.0,)


class EmulatedCopier(Copies):
    """Copies that last as long as the link takes; each direction has one of its own, in the order of the orders.

    Args:
        block_s: Seconds that a block takes.
    """

    def __init__(self, block_s: float, pace: Pace | None = None) -> None:
        super().__init__()
        self._block_s = block_s
        self._pace = pace or Pace()
        self._free_at = dict.fromkeys(Residency, 0.0)
        self._links = {
            to: ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"copy-to-{to.name.lower()}") for to in Residency
        }

    def begin(self, copy: KVCopy) -> None:
        done_at = max(self._free_at[copy.to], self._pace.now()) + len(copy.source) * self._block_s
        self._free_at[copy.to] = done_at
        self.submit(copy.copy_id, self._links[copy.to], lambda: self._pace.wait_until(done_at))


def emulate_device(config: DecoderConfig, tokenizer: Tokenizer, engine: EngineConfig, *, swaps: bool = False) -> Device:
    """Emulates a device whose work takes as long as its profile says; uses vocabulary and context of the model alone.

    Args:
        swaps: Whether there is use for a host pool.

    Raises:
        InvalidValueError: there is no such profile, or it does not say what is needed; names the field.
    """
    profile = find_device_profile(engine.profile)
    # An emulated model has no positions: any length works.
    context_len = engine.max_model_len or config.max_position_embeddings
    num_blocks = num_pool_blocks(engine, profile.kv_bytes, context_len, profile.kv_memory or None)
    auto_blocks = num_blocks if swaps and profile.copy_bandwidth else 0
    num_host_blocks = num_host_pool_blocks(engine, profile.kv_bytes, auto_blocks, None)
    runner = EmulatedRunner(profile.cost, text_token_ids(config, tokenizer))
    copier = EmulatedCopier(_block_s(profile, engine)) if num_host_blocks else None
    return Device(runner, context_len, profile.kv_bytes, num_blocks, num_host_blocks, copier)


def text_token_ids(config: DecoderConfig, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that are text and do not end an output.

    Raises:
        InvalidValueError: there are none.
    """
    ends = {*Detokenizer(tokenizer).special_ids, *config.eos_token_ids}
    ids = sorted(token_id for token_id in tokenizer.get_vocab().values() if token_id < config.vocab_size)
    ids = [token_id for token_id in ids if token_id not in ends]
    if not ids:
        raise InvalidValueError("tokenizer.json", tokenizer.get_vocab_size(), "tokens that are not special")
    return ids


def _block_s(profile: DeviceProfile, engine: EngineConfig) -> float:
    """Returns seconds of the copy of a block."""
    if not profile.copy_bandwidth:
        expected = "a profile with copy_bandwidth where there is a host pool (engine.host_kv_memory)"
        raise ConfigError("engine.device", engine.device, expected)
    return engine.kv_block_size * profile.kv_bytes / profile.copy_bandwidth


class EmulatedVision:
    """Has the interface of ``engine.vision.model.VisionModel`` and loads no torch. One thread at a time.

    Args:
        cost: Seconds of a batch of pictures.
        hidden_size: Values of a row: what rows take where they are kept is what real ones would.
    """

    def __init__(self, geometry: ImageGeometry, cost: ImageCost, hidden_size: int, pace: Pace | None = None) -> None:
        self.geometry = geometry
        self.hidden_size = hidden_size
        self._cost = cost
        self._pace = pace or Pace()

    def encode(self, images: SequenceOf[PreparedImage]) -> list[np.ndarray]:
        """Zeros, float32 ``[num_tokens, hidden_size]`` each, when the time of all images is over."""
        batch_s = self._cost.encode_s([image.num_tokens for image in images])
        self._pace.wait_until(self._pace.now() + batch_s)
        return [np.zeros((image.num_tokens, self.hidden_size), np.float32) for image in images]

    def packed(self, rows: np.ndarray) -> bytes:
        """Packs rows as those of a tower in bfloat16; a worker on an emulated device reads none of it."""
        return bytes(2 * rows.size)


def emulate_vision(model_dir: Path, profile: str, pace: Pace | None = None) -> EmulatedVision | None:
    """Emulates the encoder of a served model; None for a model that does not see.

    Args:
        profile: As ``EngineConfig.profile``.

    Raises:
        ConfigError, InvalidValueError: As ``find_device_profile``, ``load_geometry`` and ``load_model_config``.
    """
    geometry = load_geometry(model_dir)
    if geometry is None:
        return None
    return EmulatedVision(
        geometry, find_device_profile(profile).image_cost, load_model_config(model_dir).hidden_size, pace
    )
