"""Step times of simulated hardware; equal steps that follow each other are taken at once (``StepRun``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from farsight.core.costs import FREE_IMAGES, ImageCost, StepCost
from farsight.core.errors import InvalidValueError
from farsight.estimator.profile_file import A100_7B as A100_PROFILE
from farsight.kvcache import StepBatch
from farsight.kvcache.step_batch import StepWork


class LatencyModel(Protocol):
    """Step and copy times of one replica, in seconds."""

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_pairs: int = 0) -> float:
        """Seconds of one step with these prompt tokens, decoding sequences and total context.

        Args:
            prefill_pairs: Pairs of a prompt token and a token that it attends to (``core.costs.attention_pairs``).
        """
        ...

    def decode_run_s(self, decode_seqs: int, context_tokens: int, num_steps: int) -> float:
        """Seconds of these steps that only decode; each step adds one token of context per sequence."""
        ...

    def copy_s(self, num_tokens: int) -> float:
        """Seconds to copy the KV of these tokens between device and host, one way."""
        ...

    @property
    def image_cost(self) -> ImageCost:
        """What the image encoder takes, beside the steps."""
        ...

    @property
    def cost(self) -> StepCost:
        """The linear model nearest to this one, which policies price with."""
        ...


@dataclass(frozen=True, slots=True)
class LinearLatency:
    """Step times by the linear model ``StepCost``.

    Attributes:
        kv_bytes: Bytes of the KV of one token.
        copy_bandwidth: Bytes per second between device and host, each way.
        image_cost: What the image encoder takes; nothing where it is not known.
    """

    cost: StepCost
    kv_bytes: int = A100_PROFILE.kv_bytes
    copy_bandwidth: float = A100_PROFILE.copy_bandwidth
    image_cost: ImageCost = FREE_IMAGES

    def __post_init__(self) -> None:
        if self.copy_bandwidth <= 0:
            raise InvalidValueError("copy_bandwidth", self.copy_bandwidth, "bytes a second above 0")

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_pairs: int = 0) -> float:
        return self.cost.step_s(prefill_tokens, decode_seqs, context_tokens, prefill_pairs)

    def decode_run_s(self, decode_seqs: int, context_tokens: int, num_steps: int) -> float:
        return self.cost.decode_run_s(decode_seqs, context_tokens, num_steps)

    def copy_s(self, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes / self.copy_bandwidth


A100_7B = LinearLatency(A100_PROFILE.cost, image_cost=A100_PROFILE.image_cost)
"""A 7B model on an A100, as a linear profile."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak rates of a device: FLOP/s in half precision, bytes per second of its memory and of its host link."""

    name: str
    flops: float
    memory_bandwidth: float
    memory_bytes: float
    host_bandwidth: float


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a vision tower.

    Attributes:
        num_params: Parameters that each patch of a picture is multiplied with.
        patches_per_token: Patches that become one token of the prompt.
    """

    num_params: float
    patches_per_token: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder model.

    Attributes:
        num_params: All parameters, as they lie in memory.
        kv_share: KV heads / attention heads.
        expert_params: How many of them are in mixtures of experts.
        expert_share: Experts that a token takes / experts.
        vision: The tower that turns its pictures into rows; None for a model that does not see.
        attention_layers: Layers that keep keys and values; 0: all.
        state_bytes: Bytes of the states that a sequence has in the other layers, however long it is.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_params: float
    kv_share: float = 1.0
    expert_params: float = 0.0
    expert_share: float = 1.0
    vision: VisionShape | None = None
    attention_layers: int = 0
    state_bytes: int = 0

    @property
    def active_params(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.num_params - self.expert_params * (1 - self.expert_share)

    def read_params(self, tokens: float) -> float:
        """Parameters that a step of so many tokens reads, if each takes its experts at random."""
        untouched: float = (1 - self.expert_share) ** tokens
        return self.num_params - self.expert_params * untouched

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers, in half precision."""
        return int(4 * (self.attention_layers or self.num_layers) * self.hidden_size * self.kv_share)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100-32g", 112e12, 0.90e12, 32e9, 12e9),
        Gpu("a6000", 155e12, 0.77e12, 48e9, 25e9),
        Gpu("a100-40g", 312e12, 1.56e12, 40e9, 25e9),
        Gpu("a100-80g", 312e12, 2.04e12, 80e9, 25e9),
        Gpu("h100", 989e12, 3.35e12, 80e9, 50e9),
    )
}
"""Data sheet rates."""

CLIP_L_336 = VisionShape(304e6)
"""CLIP ViT-L/14 at 336 pixels, the tower of LLaVA 1.5: a token for each patch."""

QWEN_VL_TOWER = VisionShape(1.98e9, patches_per_token=4)
"""ViT-bigG of 1.9 G parameters and a resampler of 80 M, from 1,024 patches to 256 tokens (Qwen-VL, Table 1)."""

MODELS = {
    model.name: model
    for model in (
        ModelShape("opt-2.7b", 32, 2560, 2.7e9),
        ModelShape("chatglm-6b", 28, 4096, 6.2e9),
        ModelShape("llama-2-7b", 32, 4096, 6.7e9),
        ModelShape("llava-1.5-7b", 32, 4096, 6.7e9, vision=CLIP_L_336),
        ModelShape("llava-1.5-13b", 40, 5120, 13e9, vision=CLIP_L_336),
        ModelShape("qwen-vl-7b", 32, 4096, 7.7e9, vision=QWEN_VL_TOWER),
        ModelShape("mistral-7b", 32, 4096, 7.2e9, kv_share=0.25),
        ModelShape("llama-2-13b", 40, 5120, 13e9),
        ModelShape("opt-13b", 40, 5120, 13e9),
        ModelShape("opt-66b", 64, 9216, 66e9),
        ModelShape("llama-3-70b", 80, 8192, 70e9, kv_share=0.125),
        ModelShape("mixtral-8x7b", 32, 4096, 46.7e9, kv_share=0.25, expert_params=45.1e9, expert_share=2 / 8),
        ModelShape("gpt-3-175b", 96, 12288, 175e9),
        # 24 of 32 layers have 32 matrices of 128 x 128 in float32, and three rows of 8,192 values before them
        ModelShape(
            "qwen3.5-9b", 32, 4096, 9e9, kv_share=0.25, attention_layers=8, state_bytes=24 * 4 * (2**19 + 3 * 2**13)
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step takes the longer of its arithmetic and its memory traffic, at a share of the peak rates.

    With ``pipeline_parallel`` stages, as many disjoint batches are in flight, and each token passes all stages: the
    time of one iteration over all sequences is that of one such batch on all devices of its tensor-parallel group, if
    the sequences are divided evenly.
    The attention of prompts is not counted, since its share of their arithmetic is small.

    Attributes:
        efficiency: Reached share of the peak rates.
        overhead_s: Launch overhead of each step, in seconds.
    """

    gpu: Gpu
    model: ModelShape
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    efficiency: float = 0.6
    overhead_s: float = 0.004

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_pairs: int = 0) -> float:
        tokens = (prefill_tokens + decode_seqs) / self.pipeline_parallel
        context = context_tokens / self.pipeline_parallel
        flops = 2 * self.model.active_params * tokens
        traffic = 2 * self.model.read_params(tokens) + self.model.kv_bytes * (context + tokens)
        traffic += 2 * self.model.state_bytes * decode_seqs / self.pipeline_parallel  # read and written
        return self.overhead_s + max(flops / self._flops, traffic / self._bandwidth)

    @property
    def _flops(self) -> float:
        return self.gpu.flops * self.tensor_parallel * self.efficiency

    @property
    def _bandwidth(self) -> float:
        return self.gpu.memory_bandwidth * self.tensor_parallel * self.efficiency

    def decode_run_s(self, decode_seqs: int, context_tokens: int, num_steps: int) -> float:
        first = self.step_s(0, decode_seqs, context_tokens)
        last = self.step_s(0, decode_seqs, context_tokens + decode_seqs * (num_steps - 1))
        return num_steps * (first + last) / 2  # Linear in between, except where arithmetic and memory traffic cross.

    def copy_s(self, num_tokens: int) -> float:
        links = self.tensor_parallel * self.pipeline_parallel
        return num_tokens * self.model.kv_bytes / (self.gpu.host_bandwidth * links)

    @property
    def image_cost(self) -> ImageCost:
        """The tower's arithmetic on one device, and a launch for each batch; nothing for a model without a tower."""
        tower = self.model.vision
        if tower is None:
            return FREE_IMAGES
        flops = 2 * tower.num_params * tower.patches_per_token
        return ImageCost(self.overhead_s, flops / (self.gpu.flops * self.efficiency))

    @property
    def cost(self) -> StepCost:
        weights_s = 2 * self.model.num_params / self._bandwidth
        return StepCost(
            base_s=self.overhead_s + weights_s,
            prefill_token_s=2 * self.model.active_params / self._flops / self.pipeline_parallel,
            decode_seq_s=2 * self.model.state_bytes / self._bandwidth / self.pipeline_parallel,
            context_token_s=self.model.kv_bytes / self._bandwidth / self.pipeline_parallel,
        )


@dataclass(slots=True)
class StepRun:
    """Equal steps in progress, recorded when the last is over.

    Attributes:
        work: Work of the first step; each further one has one token of context more per decoding sequence.
        num_steps: 1 if the step computes prompts or may be cut off.
        ends_at: When the last of them is over.
        num_told: So many of them have been reported to the scheduler.
    """

    batch: StepBatch
    work: StepWork
    latency: LatencyModel
    began_at: float
    num_steps: int
    ends_at: float = math.inf
    num_told: int = 0

    def seconds(self, num_steps: int) -> float:
        """Seconds of the first steps."""
        if num_steps == 0:
            return 0.0
        return min(self._whole_s(num_steps), self.batch.cut_off_s)

    @property
    def is_cut_off(self) -> bool:
        """Whether the step is cut off before its end: it brings nothing."""
        return self.batch.may_be_cut_off and self.batch.cut_off_s < self._whole_s(1)

    def _whole_s(self, num_steps: int) -> float:
        if self.work.prefill_tokens:
            return self.latency.step_s(*self.work)
        return self.latency.decode_run_s(self.work.decode_seqs, self.work.context_tokens, num_steps)

    def steps_over(self, now: float) -> int:
        """How many steps are over by now."""
        low, high = self.num_told, self.num_steps
        while low < high:
            middle = (low + high + 1) // 2
            if self.began_at + self.seconds(middle) <= now:
                low = middle
            else:
                high = middle - 1
        return low

    def end_after(self, num_steps: int) -> None:
        """Sets the number of steps, and with it the end."""
        self.num_steps = num_steps
        self.ends_at = self.began_at + self.seconds(num_steps)
