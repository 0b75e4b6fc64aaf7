"""What a rank reads of a checkpoint, what it exchanges in a step, and that it does so whether it can compute or not."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError, RankLost, WorkerBroken
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.weights import CheckpointError
from farsight.engine.parallel.driver import StepReports
from farsight.engine.parallel.exchange import Arrival, Exchange
from farsight.engine.parallel.follower import _Orders
from farsight.engine.parallel.links import Link
from farsight.engine.parallel.mesh import Mesh, Part, check_parallel
from farsight.engine.parallel.shards import StageWeights, load_shard
from farsight.engine.parallel.stage import Stage, StepOutcome, free_bytes, run_largest_step
from farsight.engine.parallel.wire import (
    Copied,
    Finished,
    StepOrder,
    pack_order,
    pack_report,
    unpack_order,
    unpack_report,
)
from farsight.kvcache import KVCopy, StepItem

MAX_ROWS, MAX_SEQS = 8, 2


class Group:
    """Notes what it is given; the other column has logits of its own."""

    def __init__(self, other: Tensor | None = None) -> None:
        self.sums: list[Tensor] = []
        self.sent: list[Tensor] = []
        self._other = other

    def add_up(self, partial: Tensor) -> None:
        self.sums.append(partial.clone())
        partial += 1.0

    def send(self, hidden: Tensor) -> None:
        self.sent.append(hidden.clone())

    def receive(self, buffer: Tensor) -> Arrival:
        return Arrival(buffer, None)

    def gather(self, share: Tensor, shares: list[Tensor] | None) -> None:
        assert shares is not None and self._other is not None
        shares[0].copy_(share)
        rows, self._other = self._other[: len(share)], self._other[len(share) :]
        shares[1][:, : rows.shape[1]] = rows


@pytest.fixture
def make(model_dir: Callable[[str], Path]) -> Callable[[Group, Mesh, int], Exchange]:
    config = load_model_config(model_dir("gqa"))
    engine = EngineConfig(max_num_seqs=MAX_SEQS, max_batch_tokens=MAX_ROWS)

    def make(group: Any, mesh: Mesh, rank: int) -> Exchange:
        return Exchange(group, Part(config, mesh, rank), engine, torch.float32)

    return make


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_a_rank_without_memory_gives_zeros_to_what_is_left(make: Any, num_done: int) -> None:
    group = Group()
    exchange = make(group, Mesh(2, 2), 2)  # the first stage: one layer of two, and so two sums
    for _ in range(2):
        exchange.begin(3)
        for _ in range(num_done):
            exchange.add_up(torch.ones(3, 64))
        exchange.sit_out()
        exchange.send(None)
    expected = [torch.ones(3, 64)] * num_done + [torch.zeros(3, 64)] * (2 - num_done)
    assert len(group.sums) == 4
    assert all(torch.equal(found, wanted) for found, wanted in zip(group.sums, expected * 2, strict=True))
    assert [bool(sent.any()) for sent in group.sent] == [False, False]


def test_stages_of_one_column_have_no_sums(make: Any) -> None:
    group = Group()
    exchange = make(group, Mesh(1, 2), 1)
    exchange.begin(3)
    exchange.sit_out()
    assert exchange.add_up(torch.ones(3, 64)).sum() == 3 * 64
    assert not group.sums


def test_more_logits_than_sequences_are_gathered_in_turn(make: Any) -> None:
    """Those of a prompt."""
    logits = torch.randn(5, 320)
    whole = torch.empty(5, 320)
    exchange = make(Group(logits[:, 160:].clone()), Mesh(2, 1), 0)
    exchange.gather(logits[:, :160], 5, whole)
    assert torch.equal(whole, logits)
    exchange = make(Group(logits[:, 160:].clone()), Mesh(2, 1), 0)
    exchange.gather(None, 5, None)  # takes part, and has nothing of it


def test_a_step_is_over_when_all_have_reported() -> None:
    reports, lack = StepReports(2), Finished("no room", out_of_memory=True)
    for rank, report in ((2, lack), (1, Finished()), (1, Finished("broken")), (2, Finished())):
        read = unpack_report(pack_report(report))
        assert isinstance(read, Finished)
        reports.hear(rank, read)
    assert reports.take() == [Finished(), lack]
    assert reports.take() == [Finished("broken"), Finished()]
    reports.rank_lost()
    with pytest.raises(RankLost):
        reports.take()
    assert unpack_report(pack_report(Copied(7, failed=True))) == Copied(7, failed=True)


class Unable:
    """A stage whose every step comes to nothing, in step with the other ranks."""

    def finish(self) -> StepOutcome:
        return StepOutcome(None, Finished("RuntimeError: CUDA error: unspecified launch failure"))


@pytest.mark.parametrize("lost", [False, True])
def test_it_tells_rank_0_unless_its_device_is_lost(lost: bool) -> None:
    ours, theirs = _tcp_pair()
    orders = _Orders(Link(ours), cast(Stage, Unable()), None, lambda: None, lambda: lost, lambda: None)
    if lost:
        with pytest.raises(WorkerBroken, match="device of this rank is lost"):
            orders._finish_step()
    else:
        orders._finish_step()
        report = unpack_report(Link(theirs).receive())
        assert isinstance(report, Finished) and "unspecified launch failure" in report.failure
    ours.close()
    theirs.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """A link is a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def shards(directory: Path, mesh: Mesh) -> tuple[list[Part], list[StageWeights]]:
    config = load_model_config(directory)
    parts = [Part(config, mesh, rank) for rank in range(mesh.size)]
    return parts, [load_shard(directory, part, torch.float32) for part in parts]


@pytest.mark.parametrize("shape", ["gqa", "tied", "opt"])
@pytest.mark.parametrize("mesh", [Mesh(2, 1), Mesh(1, 2), Mesh(2, 2)], ids=str)
def test_a_rank_reads_no_more_of_the_vocabulary_than_it_needs(
    model_dir: Callable[[str], Path], shape: str, mesh: Mesh
) -> None:
    config = load_model_config(model_dir(shape))
    parts, weights = shards(model_dir(shape), mesh)
    for part, own in zip(parts, weights, strict=True):
        assert (own.lm_head is not None, own.norm is not None) == (part.is_last, part.is_last)
        assert (own.embedding is not None) == part.is_first
    heads = [own.lm_head for own in weights if own.lm_head is not None]
    assert sum(len(head) for head in heads) == config.vocab_size and len(heads) == mesh.tensor


def test_ranks_and_places_and_the_layers_of_the_early_stages(model_dir: Callable[[str], Path]) -> None:
    mesh = Mesh(2, 3)
    places = [(mesh.stage_of(rank), mesh.column_of(rank)) for rank in range(6)]
    assert places == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert [mesh.rank_at(*place) for place in places] == list(range(6))
    parts = [Part(load_model_config(model_dir("qwen3")), Mesh(1, 2), rank) for rank in (1, 0)]
    assert [part.layers for part in parts] == [range(2), range(2, 3)]
    assert [part.config.sliding_windows for part in parts] == [(9, None), (9,)]


CPU = EngineConfig()


@pytest.mark.parametrize(
    ("mesh", "changes", "engine", "match"),
    [
        (Mesh(3, 1), {}, CPU, r"tensor_parallel: got 3, expected a divisor of the model's 4 attention"),
        (Mesh(1, 3), {}, CPU, r"pipeline_parallel: got 3, expected at most the model's 2 layers"),
        (Mesh(2, 1), {}, EngineConfig(device="emulated:a100-7b"), r"engine\.device.*a real device"),
        (Mesh(2, 1), {}, EngineConfig(backend="native"), r"engine\.backend.*any other"),
        (Mesh(2, 1), {}, EngineConfig(kv_dtype="int8"), r"engine\.kv_dtype: .*several ranks"),
        (
            Mesh(2, 1),
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            CPU,
            "a divisor or a multiple of the model's 3 key-value heads",
        ),
        (Mesh(2, 1), {"intermediate_size": 113}, CPU, "divisor of the model's intermediate size 113"),
    ],
)
def test_what_cannot_be_split_is_refused(
    model_dir: Callable[[str], Path], mesh: Mesh, changes: dict[str, int], engine: EngineConfig, match: str
) -> None:
    config = dataclasses.replace(load_model_config(model_dir("gqa")), **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=match):
        check_parallel(mesh, config, engine)


@pytest.mark.parametrize("change", ["missing", "shape", "unknown"])
def test_a_broken_checkpoint_is_refused_by_ranks_that_do_not_need_what_is_broken(
    model_dir: Callable[[str], Path], tmp_path: Path, change: str
) -> None:
    directory = model_dir("gqa")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    else:
        name = "model.layers.7.mlp.up_proj.weight"
        tensors[name] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    rank = 0 if change == "shape" else 1  # rank 1 has the first layer
    with pytest.raises(CheckpointError, match=name):
        load_shard(tmp_path, Part(load_model_config(tmp_path), Mesh(1, 2), rank), torch.float32)


def test_orders_cross_the_wire_unchanged() -> None:
    rows = torch.arange(12).view(3, 4).numpy()
    items = [StepItem("", 9, 1, True, [3, 1, 2]), StepItem("", 0, 3, False, [5])]
    read = unpack_order(pack_order(StepOrder(items, rows, [1, 2])))
    assert isinstance(read, StepOrder)
    assert (read.items, read.rows.tolist(), read.more_rows) == (items, rows.tolist(), [1, 2])
    for copy in (KVCopy(7, 1, (4, 5), (0, 9)), KVCopy(8, 0, (), ())):  # type: ignore[arg-type]
        assert unpack_order(pack_order(copy)) == copy


@pytest.mark.parametrize("rank", [0, 3])
def test_the_largest_step_runs_on_a_rank_alone(model_dir: Callable[[str], Path], rank: int) -> None:
    """What is measured of a GPU is free of everything but this; here it only has to run."""
    directory = model_dir("gqa")
    part = Part(load_model_config(directory), Mesh(2, 2), rank)
    weights = load_shard(directory, part, torch.float32)
    engine = EngineConfig(block_size=4, max_num_seqs=3, max_batch_tokens=40)
    run_largest_step(part, weights, engine)
    assert free_bytes(part, weights, engine, num_sharers=4) > 2 * free_bytes(part, weights, engine, num_sharers=16)
