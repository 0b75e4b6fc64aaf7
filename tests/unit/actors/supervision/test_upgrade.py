"""The steps of an upgrade: their order, what is left after a failure, and that a successor finishes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from farsight.actors.runtime.names import own_replicas
from farsight.actors.runtime.peer import Site
from farsight.actors.runtime.watching import ClusterStore
from farsight.actors.supervision import upgrade as module
from farsight.actors.supervision.ingress_reports import IngressReports
from farsight.actors.supervision.upgrade import RollingUpgrade, check_model
from farsight.core.config.load import FarsightConfig
from farsight.core.errors import FarsightError, MessageError
from farsight.core.messages.status import ComponentCounts
from farsight.core.messages.supervision import Upgrade, WeightsState
from farsight.services.launch.launch import EMBEDDED_MODEL

SITE = Site(FarsightConfig(), "", "fused")


class Crash(Exception):
    """The process of the Supervisor has ended."""


class Fleet:
    """What outlives a Supervisor: the store, the counts and the processes.

    Attributes:
        running: Replicas and the version of the weights that their processes were started with.
        steps: Each change, as the versions that ran after it.
    """

    def __init__(self, replicas: int) -> None:
        self.values: dict[str, bytes] = {}
        self.counts = ComponentCounts(replicas, 1, 1, 0)
        self.running = {str(index): 0 for index in range(replicas)}
        self.steps: list[dict[str, int]] = []
        self.renewed: list[str] = []
        self.crash_in: int | None = None
        self.broken_versions: set[int] = set()
        self.hears = True
        self.upgrade = self._supervisor()

    def _supervisor(self) -> RollingUpgrade:
        store = cast(ClusterStore, self)
        ingresses = cast(IngressReports, self)
        return RollingUpgrade(store, str(EMBEDDED_MODEL), ingresses, lambda: self.counts, self.change, self.renew)

    async def restarted(self) -> RollingUpgrade:
        """A Supervisor that starts after a crash, and knows nothing but what is stored."""
        self.upgrade = self._supervisor()
        await self.upgrade.load()
        return self.upgrade

    async def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    async def put(self, key: str, value: bytes) -> None:
        self._maybe_crash()
        self.values[key] = value

    def model_version(self) -> int | None:
        return self.upgrade.state.current

    def oldest_version(self) -> int | None:
        return self.upgrade.state.current if self.hears else self.upgrade.state.oldest

    async def change(self, counts: ComponentCounts) -> None:
        self._maybe_crash()
        self.counts = counts
        for replica in set(self.running) - set(own_replicas(counts)):
            del self.running[replica]
        for replica in own_replicas(counts):
            version = self.upgrade.site_of(f"worker-{replica}", SITE).model_version
            if self.running.setdefault(replica, version) in self.broken_versions:
                del self.running[replica]
                raise FarsightError(f"worker-{replica} cannot start")
        self.steps.append(dict(self.running))

    async def renew(self, component: str) -> None:
        self._maybe_crash()
        self.renewed.append(component)

    def _maybe_crash(self) -> None:
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.crash_in = None
                raise Crash


async def run(fleet: Fleet, **order: Any) -> None:
    await fleet.upgrade.begin(Upgrade(str(EMBEDDED_MODEL), **order), SITE.config)
    await fleet.upgrade.run()


async def test_half_of_the_replicas_follow_before_new_requests_do_and_the_rest_after() -> None:
    fleet = Fleet(3)
    await run(fleet)
    assert fleet.steps == [
        {"0": 0, "1": 0, "2": 0, "3": 1},
        {"1": 0, "2": 0, "3": 1},
        {"0": 1, "1": 0, "2": 0, "3": 1},
        {"0": 1, "2": 0, "3": 1},
        {"0": 1, "1": 1, "2": 0, "3": 1},
        {"0": 1, "1": 1, "3": 1},
        {"0": 1, "1": 1, "2": 1, "3": 1},
        {"0": 1, "1": 1, "2": 1},
    ]
    assert fleet.renewed == ["length-predictor-0"]
    state = fleet.upgrade.state
    assert (state.current, state.oldest, state.version_of, len(state.dirs)) == (1, 1, (), 1)
    assert fleet.upgrade.site_of("length-predictor-0", SITE).model_since == state.since > 0
    assert fleet.upgrade.site_of("rank-0.1", SITE).model_version == 1
    assert fleet.upgrade.site_of("control", SITE) is SITE


@pytest.mark.parametrize("surge", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 3])
async def test_a_successor_finishes_what_a_crash_left(replicas: int, surge: bool) -> None:
    """Whenever the Supervisor ends, and however often."""
    num_crashes = 0
    for crash_in in range(40):
        fleet = Fleet(replicas)
        await fleet.upgrade.begin(Upgrade(str(EMBEDDED_MODEL), surge), SITE.config)
        fleet.crash_in = crash_in
        try:
            await fleet.upgrade.run()
        except Crash:
            num_crashes += 1
            upgrade = await fleet.restarted()
            await fleet.change(fleet.counts)  # it starts what is wanted and does not run
            assert upgrade.is_under_way
            await upgrade.run()
        assert fleet.running == {str(index): 1 for index in range(replicas)}
        assert fleet.counts == ComponentCounts(replicas, 1, 1, 0)
        assert not fleet.upgrade.is_under_way
    assert 3 <= num_crashes < 40


async def test_settings_roll_like_weights_and_add_up() -> None:
    fleet = Fleet(2)
    for tables, expected in (({"num_threads": 3}, (3, "auto")), ({"kv_memory": "64MiB"}, (3, "64MiB"))):
        order = Upgrade("", settings=json.dumps({"engine": tables, "server": {"port": 8000}}))
        assert await fleet.upgrade.begin(order, SITE.config)
        await fleet.upgrade.run()
        engine = fleet.upgrade.site_of("worker-1", SITE).config.engine
        assert (engine.num_threads, engine.kv_memory) == expected
    assert fleet.running == {"0": 2, "1": 2}
    assert fleet.renewed == [], "the weights are the same, and so are the lengths of outputs"
    same = Upgrade("", settings='{"engine": {"kv_memory": "64MiB"}}')
    assert not await fleet.upgrade.begin(same, SITE.config)
    back = Upgrade("", settings='{"engine": {"kv_memory": "auto", "num_threads": 0}}')
    assert await fleet.upgrade.begin(back, SITE.config)
    await fleet.upgrade.run()
    assert fleet.upgrade.site_of("worker-1", SITE).config == SITE.config
    assert (await fleet.restarted()).state.settings_of(3) == "{}"


async def test_the_switch_is_told_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(f"{module.__name__}.time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    fleet = Fleet(1)
    assert fleet.upgrade.switch_in_s() == 0.0
    await run(fleet)
    assert fleet.upgrade.switch_in_s() == module.SWITCH_S
    now += module.SWITCH_S
    assert fleet.upgrade.switch_in_s() == 0.0


async def test_settings_of_a_scheduler_roll_with_its_replica() -> None:
    fleet = Fleet(2)
    tables = {"scheduler": {"gamma": 0.5, "watermark": 0.8}, "engine": {"num_threads": 3}}
    assert await fleet.upgrade.begin(Upgrade("", settings=json.dumps(tables)), SITE.config)
    seen = fleet.upgrade.site_of("scheduler-0", SITE).config
    assert seen == SITE.config, "its replica has not followed"
    await fleet.upgrade.run()
    for replica in ("0", "1"):
        rolled = fleet.upgrade.site_of(f"scheduler-{replica}", SITE).config
        assert rolled is not None
        assert (rolled.scheduler.gamma, rolled.scheduler.watermark, rolled.engine.num_threads) == (0.5, 0.8, 3)
        assert fleet.upgrade.site_of(f"worker-{replica}", SITE).config == rolled
    assert fleet.upgrade.site_of("log-store", SITE) is SITE
    assert (fleet.upgrade.limits(), fleet.renewed) == ("{}", [])


async def test_components_of_the_whole_service_start_again_where_they_read_what_has_changed() -> None:
    fleet = Fleet(2)
    tables = {"placement": {"window_s": 60.0}, "batch": {"num_bins": 7}, "predictor": {"cpu_share": 0.05}}
    assert await fleet.upgrade.begin(Upgrade("", settings=json.dumps(tables)), SITE.config)
    await fleet.upgrade.run()
    assert fleet.steps == [], "no replica starts again"
    assert fleet.renewed == ["router", "serving-time-estimator-0"], "the predictor's share is what it was"
    seen = fleet.upgrade.site_of("router", SITE).config
    assert (seen.placement.window_s, seen.batch.num_bins) == (60.0, 7)
    assert not await fleet.upgrade.begin(Upgrade("", settings=json.dumps(tables)), SITE.config)

    both = Upgrade("", settings='{"predictor": {"learn": false}, "engine": {"num_threads": 3}}')
    assert await fleet.upgrade.begin(both, SITE.config)
    await fleet.upgrade.run()
    assert (fleet.running, fleet.renewed[2:]) == ({"0": 1, "1": 1}, ["length-predictor-0"])
    predictor = fleet.upgrade.site_of("length-predictor-0", SITE)
    assert predictor.model_since == fleet.upgrade.state.since
    assert not predictor.config.predictor.learn and predictor.config.placement.window_s == 60.0


@pytest.mark.parametrize("crash_in", range(3))
async def test_a_successor_starts_the_readers_again(crash_in: int) -> None:
    fleet = Fleet(1)
    order = Upgrade("", settings='{"batch": {"max_wait_s": 0.5}}')
    assert await fleet.upgrade.begin(order, SITE.config)
    fleet.crash_in = crash_in
    with pytest.raises(Crash):
        await fleet.upgrade.run()
    successor = await fleet.restarted()
    assert successor.is_under_way
    await successor.run()
    assert fleet.renewed[-2:] == ["router", "serving-time-estimator-0"]
    assert not (await fleet.restarted()).is_under_way


async def test_limits_at_the_door_change_at_once_and_no_process_starts_again() -> None:
    fleet = Fleet(2)
    order = Upgrade("", settings='{"server": {"max_wait_s": 7.0, "max_queued_requests": 9, "port": 8000}}')
    assert not await fleet.upgrade.begin(order, SITE.config)
    assert (fleet.steps, fleet.upgrade.is_under_way) == ([], False)
    successor = await fleet.restarted()
    assert json.loads(successor.limits()) == {"server": {"max_queued_requests": 9, "max_wait_s": 7.0}}
    assert await successor.begin(Upgrade("", settings='{"engine": {"num_threads": 2}}'), SITE.config)
    assert json.loads(successor.limits())["server"]["max_wait_s"] == 7.0
    await successor.run()
    assert fleet.running == {"0": 1, "1": 1} and json.loads(successor.limits())["server"]["max_wait_s"] == 7.0
    assert not await successor.begin(
        Upgrade("", settings='{"server": {"max_wait_s": 300.0, "max_queued_requests": 2048}}'), SITE.config
    )
    assert successor.limits() == "{}"


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ('{"server": {"port": 9000}}', "server.port"),
        ('{"server": {"max_wait_s": -1}}', "server.max_wait_s"),
        ('{"scheduler": {"gamma": -1}}', "scheduler.gamma"),
        ('{"batch": {"batch_size": 7}}', "batch.batch_size"),
        ('{"batch": {"num_bins": 0}}', "batch.num_bins"),
        ('{"predictor": {"wait_s": 7.0}}', "predictor.wait_s"),
        ('{"engine": {"max_num_seqs": 2}}', "engine.max_num_seqs"),
        ('{"engine": {"kv_memory": "many"}}', "engine.kv_memory"),
        ('{"engine": {"kv_memory": 3}}', "engine.kv_memory"),
        ('{"engine": {"backend": "xformers"}}', "engine.device"),
        ('{"engine": {"kv_memroy": "1GiB"}}', "engine.kv_memroy"),
        ('{"scheduler": {"preset": "gittins"}}', "scheduler.preset"),
        ('{"replica": [{"url": "http://127.0.0.1:1"}]}', "replica"),
        ('{"engine": 3}', "engine"),
        ("[]", "config"),
    ],
)
async def test_what_cannot_roll_is_refused_by_name(tables: str, field: str) -> None:
    fleet = Fleet(2)
    with pytest.raises(MessageError) as refusal:
        await fleet.upgrade.begin(Upgrade("", settings=tables), SITE.config)
    assert refusal.value.field == field
    assert not fleet.upgrade.is_under_way


@pytest.mark.parametrize("surge", [True, False])
async def test_weights_that_do_not_start_leave_the_old_ones(surge: bool) -> None:
    fleet = Fleet(2)
    fleet.broken_versions = {1}
    with pytest.raises(FarsightError, match="cannot start"):
        await run(fleet, surge=surge)
    assert fleet.running == {"0": 0, "1": 0}
    assert (fleet.upgrade.state.current, fleet.upgrade.is_under_way) == (0, False)
    fleet.broken_versions = set()
    await run(fleet, surge=surge)
    assert fleet.running == {"0": 2, "1": 2}, "the number of the failed version is not used again"


async def test_requests_that_take_too_long_on_old_weights_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARD_S", 0.0)
    fleet = Fleet(1)
    fleet.hears = False
    saved = []
    put = fleet.put

    async def watched(key: str, value: bytes) -> None:
        await put(key, value)
        saved.append(fleet.upgrade.state)

    fleet.put = watched  # type: ignore[method-assign]
    await run(fleet, drain_s=0.0)
    ended = [state for state in saved if state.oldest == 1]
    assert ended[0].of("0") == 0, "they are ended before their replica is"
    assert fleet.running == {"0": 1}


def test_the_state_is_what_a_successor_needs() -> None:
    state = WeightsState(((0, "/a"),)).begun("/b", "{}", ["0", "1"], "2", 600.0)
    assert [state.of(replica) for replica in ("0", "2", "9")] == [0, 1, 0]
    assert dataclasses.replace(state, current=1).of("0") == 0, "a replica that has not followed runs the old weights"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("relative", "absolute path"),
        ("/nowhere/at/all", "absolute path"),
        ("/dev/null", "absolute path"),
        ("/proc", "tokenizer.json differs"),
    ],
)
def test_a_path_that_is_no_such_model_is_refused(wanted: str, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        check_model(EMBEDDED_MODEL, wanted)


@pytest.mark.parametrize("config", ["{", "[]", '{"vocab_size": 7}', "[" * 100_000])
def test_another_vocabulary_is_refused(tmp_path: Path, config: str) -> None:
    for name in module.TEXT_FILES:
        if (EMBEDDED_MODEL / name).exists():
            (tmp_path / name).write_bytes((EMBEDDED_MODEL / name).read_bytes())
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(MessageError, match="vocab_size"):
        check_model(EMBEDDED_MODEL, str(tmp_path))
