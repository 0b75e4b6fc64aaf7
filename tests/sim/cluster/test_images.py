"""Requests with pictures: they wait for the encoder and for nothing else, and equal pictures are found again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import ImageCost, StepCost
from farsight.core.errors import InvalidValueError
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.encoder import MAX_BATCH, SimulatedEncoder
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import GPUS, LinearLatency, ModelShape, Roofline, VisionShape
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.experiment import Experiment
from farsight.simulator.run import run
from farsight.simulator.traffic.workload import SimImage, SimRequest, image_spans, shared_blocks

COST = StepCost(base_s=1.0, prefill_token_s=0.1, decode_seq_s=0.0, context_token_s=0.0)
LATENCY = LinearLatency(COST, image_cost=ImageCost(token_s=0.5))
"""A picture of 10 tokens is encoded in 5 s."""


def schedulers(preset: str = "fcfs", max_new_tokens: int = 4096) -> Callable[[int], ReplicaScheduler]:
    limits, settings = (
        SchedulerLimits(16, standby_slots=0),
        PolicySettings(SchedulerConfig(watermark=1.0, max_gap_ms=0.0), max_new_tokens=max_new_tokens),
    )
    return lambda index: build_scheduler(preset, limits, settings)


def fleet(
    num_blocks: int = 100, *, shares: bool = False, clients: int | None = None, cache_tokens: int = 1000
) -> Fleet:
    replica = ReplicaShape(num_blocks, 4, shares_prefixes=shares)
    shape = FleetShape(replica, LATENCY, image_cache_tokens=cache_tokens)
    return Fleet(shape, build_router("fcfs"), schedulers(), clients=clients)


def seen(name: str, at: float, picture: str = "", *, prompt_len: int = 14, output_len: int = 2) -> SimRequest:
    return SimRequest(name, at, prompt_len, output_len, 10, images=(SimImage(10, picture),))


def by_id(records: list[Record]) -> dict[str, Record]:
    return {record.arrival.request_id: record for record in records}


def test_a_request_begins_when_its_picture_is_encoded() -> None:
    (record,) = fleet().run([seen("a", 2.0)]).done
    # encoded from 2 to 7, then a step of 14 prompt tokens, then one that decodes
    assert record.first_token_at == pytest.approx(7.0 + 2.4)
    assert record.finished_at == pytest.approx(7.0 + 2.4 + 1.0)
    assert record.ttft_s == pytest.approx(5.0 + 2.4)  # the client waits for the encoder too
    records = by_id(fleet(clients=1).run([seen("a", 0.0), seen("b", 0.0)]).done)
    assert records["b"].arrival.arrived_at == records["a"].finished_at == pytest.approx(8.4), "so does a closed loop"


def test_pictures_are_encoded_while_text_goes_on() -> None:
    arrivals = [seen("a", 0.0), seen("b", 1.0), seen("c", 2.0), SimRequest("text", 1.0, 5, 6, 10)]
    records = by_id(fleet().run(sorted(arrivals, key=lambda each: each.arrived_at)).done)
    # text: prefill of 5 until 2.5, then steps of 1 s; a's rows come at 5, in the step that ends at 5.5
    assert records["text"].first_token_at == pytest.approx(2.5)
    assert records["a"].first_token_at == pytest.approx(5.5 + 2.4)
    # b and c, which have waited for a, are encoded together from 5 to 15, when nothing else runs
    assert records["b"].first_token_at == records["c"].first_token_at == pytest.approx(15.0 + 1.0 + 2.8)


def test_an_equal_picture_is_neither_encoded_nor_computed_again() -> None:
    system = fleet(shares=True)
    arrivals = [seen("a", 0.0, "cat"), seen("b", 20.0, "cat"), seen("c", 40.0, "dog"), seen("d", 60.0)]
    records = by_id(system.run(arrivals).done)
    assert [records[name].cached_len for name in "abcd"] == [0, 8, 0, 0]  # two full blocks of 4 hold the picture alone
    assert records["b"].first_token_at == pytest.approx(20.0 + 1.0 + 0.1 * 6)
    assert (system.encoder.num_encoded, system.encoder.num_found) == (3, 1)
    assert system.encoder.busy_s == pytest.approx(15.0)
    system = fleet()
    records = by_id(system.run([seen("a", 0.0, "cat"), seen("b", 3.0, "cat")]).done)
    assert system.encoder.num_encoded == 1, "who asks while it is being encoded waits for it"
    assert records["a"].first_token_at == records["b"].first_token_at == pytest.approx(5.0 + 1.0 + 2.8)


def test_the_encoder_keeps_the_latest_pictures() -> None:
    encoder = SimulatedEncoder(ImageCost(token_s=1.0), cache_tokens=20)
    cat, dog, cow = SimImage(10, "cat"), SimImage(10, "dog"), SimImage(10, "cow")

    def encode(name: str, *images: SimImage, at: float) -> float:
        """When its rows are there."""
        if encoder.submit(name, images):
            return at
        encoder.begin(at)
        ends_at = encoder.ends_at
        assert encoder.finish(ends_at) == [name]
        return ends_at

    assert encode("a", cat, dog, at=0.0) == 20.0
    assert encode("b", cat, at=30.0) == 30.0
    assert encode("c", cow, at=30.0) == 40.0  # drops the dog, which was used before the cat
    assert encode("d", cat, at=50.0) == 50.0
    assert encode("e", dog, at=50.0) == 60.0
    assert (encoder.num_encoded, encoder.num_found) == (4, 2)
    assert encode("f", at=70.0) == 70.0
    assert encode("g", SimImage(30, "large"), at=70.0) == 100.0  # larger than what is kept
    assert encode("h", cat, at=100.0) == 110.0
    assert encoder.ends_at == math.inf


def test_a_batch_takes_what_waits_up_to_its_bound() -> None:
    encoder = SimulatedEncoder(ImageCost(batch_s=1.0, pair_s=0.01), cache_tokens=10_000)
    pictures = [SimImage(10, str(number)) for number in range(MAX_BATCH + 3)]
    assert not encoder.submit("a", pictures[:1]) and encoder.ends_at == math.inf
    encoder.begin(0.0)
    assert encoder.ends_at == pytest.approx(2.0)
    assert not encoder.submit("b", pictures[1:])
    assert not encoder.submit("c", pictures[:2])
    encoder.begin(1.0)  # changes nothing: a batch is under way
    assert encoder.finish(2.0) == ["a"]  # c lacks its second picture still
    assert encoder.ends_at == pytest.approx(2.0 + 1.0 + MAX_BATCH)
    assert encoder.finish(encoder.ends_at) == ["c"]
    assert encoder.finish(encoder.ends_at) == ["b"]
    assert encoder.busy_s == pytest.approx(2.0 + 17.0 + 3.0) and encoder.ends_at == math.inf


def test_image_tokens_take_memory_of_admission() -> None:
    """Two prompts of 14 tokens with outputs of 10 need 48 tokens: a pool of 40 holds one at a time."""
    for preset in ("past-future", "conservative"):
        one, two = (
            Fleet(
                FleetShape(ReplicaShape(blocks, 4), LinearLatency(COST)),
                build_router("fcfs"),
                schedulers(preset, max_new_tokens=10),
            )
            for blocks in (10, 14)
        )
        arrivals = [seen("a", 0.0, output_len=10), seen("b", 0.0, output_len=10)]
        alone, together = by_id(one.run(arrivals).done), by_id(two.run(arrivals).done)
        assert alone["b"].first_token_at >= alone["a"].finished_at, preset
        assert together["b"].first_token_at == together["a"].first_token_at, preset


def test_placement_by_prefixes_finds_a_picture() -> None:
    """E2 places requests by the blocks of their prompts, which an equal picture names alike."""
    experiment = Experiment(
        scheduler=SchedulerConfig(preset="preble"), num_replicas=2, kv_tokens=8000, latency=LinearLatency(COST)
    )
    picture = tuple(
        SimRequest(f"{name}{i}", 40.0 * i + shift, 640, 4, 8, images=(SimImage(576, name),))
        for i in range(6)
        for name, shift in (("cat", 0.0), ("dog", 1.0))
    )
    without = [replace(each, images=(SimImage(576),)) for each in picture]
    found, missed = run(experiment, picture), run(experiment, without)
    where = {
        name: {r.replica for r in found.recorder.done if r.arrival.request_id[:3] == name} for name in ("cat", "dog")
    }
    assert all(len(replicas) == 1 for replicas in where.values())
    assert found.summary.prefix_hit_rate == pytest.approx(10 * 576 / (12 * 640))
    assert missed.summary.prefix_hit_rate == 0.0
    assert (found.summary.num_images_encoded, missed.summary.num_images_encoded) == (2, 12)


def test_blocks_are_named_by_all_that_is_before_them() -> None:
    def names(prefix: tuple[int, ...], *images: SimImage, prompt_len: int = 40) -> tuple[int, ...]:
        return shared_blocks(prefix, images, image_spans("r", images, prompt_len, len(prefix), 4), 4)

    cat, dog = SimImage(10, "cat"), SimImage(10, "dog")
    assert names((), cat) == names((), cat, prompt_len=10)
    assert names((1, 2), cat)[:2] == (1, 2) and len(names((1, 2), cat)) == 4
    assert not set(names((1, 2), cat)[2:]) & {*names((), cat), *names((1, 3), cat)[2:]}
    both = names((), cat, dog)
    assert both[:2] == names((), cat) and len(both) == 5
    assert names((), dog, cat)[:2] == names((), dog) and not set(both) & set(names((), dog, cat))
    assert names((), cat, SimImage(10)) == names((), cat)
    assert names((), SimImage(10), cat) == ()
    assert names((1,) * 10, cat) == (1,) * 10  # the picture lies within the shared beginning
    assert names((), replace(cat, tokens=9)) != names((), cat)
    with pytest.raises(InvalidValueError, match="image_tokens"):
        SimImage(0)
    with pytest.raises(InvalidValueError, match="at most the 9 tokens of the prompt"):
        seen("a", 0.0, prompt_len=9).spans(4)


def test_a_roofline_encodes_by_the_arithmetic_of_its_tower() -> None:
    model = ModelShape("sees", 32, 4096, 6.7e9, vision=VisionShape(304e6, patches_per_token=4))
    roofline = Roofline(GPUS["a100-80g"], model, tensor_parallel=2)
    cost = roofline.image_cost
    assert cost.encode_s([576]) == pytest.approx(0.004 + 2 * 304e6 * 4 * 576 / (312e12 * 0.6))
    assert cost.encode_s([]) == 0.0
    assert replace(roofline, model=replace(model, vision=None)).image_cost.is_free
    for name in ("batch_s", "token_s", "pair_s"):
        with pytest.raises(InvalidValueError, match=f"image_{name}"):
            ImageCost(**{name: -1.0})
