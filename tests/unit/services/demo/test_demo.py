"""The demo: figures over requests that have ended whole at both services; and its address, which no other page can read
or kill a process through."""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from farsight.core.config.load import make_config
from farsight.core.errors import ConfigError, FarsightError, InvalidValueError
from farsight.services.bench.answers import Answer, Failure
from farsight.services.demo.live_service import LiveService
from farsight.services.demo.pages import TOKEN_HEADER, DemoPages
from farsight.services.demo.race import Race
from farsight.services.demo.run import request_body, simulated_ratio
from farsight.services.demo.settings import DemoSettings, to_toml
from farsight.simulator.traffic.workload import SimRequest
from tests.free_ports import free_port

BEGAN_AT = 100.0


def arrivals(num: int) -> list[SimRequest]:
    return [SimRequest(f"chat-{i}", float(i), 8, 5, 64, app="chat") for i in range(num)]


def race(num: int) -> Race:
    made = Race(("fcfs", "farsight"), arrivals(num))
    made.began_at = BEGAN_AT
    return made


def end(race: Race, side: int, lane: int, jct_s: float, failure: Failure | None = None) -> None:
    """The answer of a request, whose tokens come every 0.1 s until its end."""
    due = BEGAN_AT + race.arrivals[lane].arrived_at
    chunks = [due + jct_s - 0.1 * left for left in (4, 3, 2, 1, 0)]
    answer = Answer(lane, "chat", due, ended_at=due + jct_s, chunks_at=chunks, num_tokens=5, failure=failure)
    race.sides[side].lanes[lane].answer = answer


def test_means_are_over_requests_that_ended_at_both() -> None:
    run = race(3)
    end(run, 0, 0, 4.0)
    end(run, 0, 1, 6.0)
    end(run, 1, 1, 3.0)
    assert run.paired() == [[6.0], [3.0]] and run.ratio() == 0.5 and not run.is_over
    view = run.view(now=BEGAN_AT + 9.0)
    assert (view["paired"], view["ratio"], view["elapsed_s"]) == (1, 0.5, 9.0)
    assert [side["ended"] for side in view["sides"]] == [2, 1]


def test_a_broken_stream_counts_as_ended_and_in_no_mean() -> None:
    run = race(1)
    end(run, 0, 0, 4.0)
    end(run, 1, 0, 1.0, Failure("stream cut", "the peer closed the connection"))
    assert run.is_over and run.ratio() is None
    assert [side["broken"] for side in run.view(BEGAN_AT + 5.0)["sides"]] == [0, 1]
    assert run.result()["sides"][1]["mean_s"] is None


def test_a_lane_shows_its_pauses() -> None:
    run = race(1)
    chunks = [BEGAN_AT + at for at in (1.0, 1.1, 2.0, 2.1)]
    run.sides[0].lanes[0].answer = Answer(0, "chat", BEGAN_AT, chunks_at=chunks)
    assert run.sides[0].lanes[0].row(BEGAN_AT) == [0.0, 1.0, 2.1, False, [(1.1, 2.0)]]
    assert run.sides[1].lanes[0].row(BEGAN_AT) == [0.0, None, None, False, []]


def test_the_service_gets_the_devices_of_the_simulated_run() -> None:
    settings = DemoSettings(num_requests=20)
    requests = settings.arrivals()
    tables = tomllib.loads(to_toml(settings.config("farsight", requests)))
    config, experiment = make_config(tables), settings.experiment("farsight")
    assert config.scheduler.preset == "farsight" and not config.predictor.from_traffic
    assert config.engine.max_num_seqs == experiment.max_num_seqs
    assert config.engine.max_batch_tokens == experiment.max_batch_tokens
    assert config.engine.max_model_len == max(each.prompt_len + each.max_new_tokens for each in requests)


def test_prompts_share_no_prefix_and_hide_their_lengths() -> None:
    one, two = (request_body(each, "model") for each in arrivals(2))
    assert one["prompt"] != two["prompt"] and len(one["prompt"]) == 8
    assert (one["max_tokens"], one["benchmark_len"]) == (64, 5)


def test_the_default_arrivals_show_a_difference() -> None:
    settings = DemoSettings()
    assert simulated_ratio(settings, settings.arrivals()) < 0.7


def test_settings_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="--requests"):
        DemoSettings(num_requests=1)
    with pytest.raises(InvalidValueError, match="kv_tokens"):
        DemoSettings(kv_tokens=64).arrivals()
    with pytest.raises(InvalidValueError, match="workload"):
        DemoSettings(trace="no-such-trace").arrivals()


RESPONSE_ID = f"cmpl-{'a' * 32}"


class FakeService(LiveService):
    """Counts its deaths; its server is another site of this test."""

    num_killed = 0

    async def kill_worker(self, session: aiohttp.ClientSession) -> int:
        self.num_killed += 1
        if self.num_killed > 1:
            raise FarsightError("no worker is ready")
        return 4321


class Site:
    """The running pages, and who asks them."""

    def __init__(self, race: Race, services: list[FakeService], url: str, asking: aiohttp.ClientSession) -> None:
        self.race, self.services = race, services
        self.pages = DemoPages(race, list(services), asking, int(url.rpartition(":")[2]))
        self.headers = {"Origin": url, TOKEN_HEADER: self.pages.token}
        self.get, self.post = asking.get, asking.post


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    race, port = Race(("fcfs", "farsight"), arrivals(3)), free_port()
    services = [FakeService(f"{side}-{preset}", tmp_path, {}) for side, preset in enumerate(("fcfs", "farsight"))]
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(url) as asking:
        site = Site(race, services, url, asking)
        runner = web.AppRunner(site.pages.app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield site
        await runner.cleanup()


async def test_the_page_needs_nothing_from_elsewhere(site: Site) -> None:
    async with site.get("/") as reply:
        page, policy = await reply.text(), reply.headers["Content-Security-Policy"]
    assert site.pages.token in page and "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"""(src|href)=["']https?:""", page)


async def test_the_view_is_json_of_both_sides(site: Site) -> None:
    async with site.get("/race") as reply:
        view = await reply.json()
    assert [side["preset"] for side in view["sides"]] == ["fcfs", "farsight"]
    assert view["elapsed_s"] is None and view["sides"][0]["lanes"] == []


async def test_the_pages_own_button_kills_once(site: Site) -> None:
    async with site.post("/kill/1", headers=site.headers) as reply:
        assert (reply.status, await reply.json()) == (200, {"pid": 4321})
    async with site.post("/kill/1", headers=site.headers) as reply:
        assert reply.status == 429
    assert [service.num_killed for service in site.services] == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"Origin": "http://evil.example"},
        {"Origin": ""},
        {"Origin": "null"},
        {TOKEN_HEADER: "guessed"},
        {TOKEN_HEADER: "\u00e9"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1:1"},
    ],
)
async def test_a_strange_page_kills_nothing(site: Site, change: dict[str, str]) -> None:
    async with site.post("/kill/1", headers=site.headers | change) as reply:
        assert reply.status == 403
    assert site.services[1].num_killed == 0


async def test_a_rebound_name_reads_nothing(site: Site) -> None:
    for path in ("/", "/race", "/explain/0/0"):
        async with site.get(path, headers={"Host": "evil.example"}) as reply:
            assert reply.status == 403 and site.pages.token not in await reply.text()


async def test_addresses_that_do_not_exist(site: Site) -> None:
    for path in ("/kill/2", "/kill/x"):
        async with site.post(path, headers=site.headers) as reply:
            assert reply.status == 404
    for path in ("/explain/0/0", "/explain/1/9999", "/explain/0/-1", "/explain/2/0"):
        async with site.get(path) as reply:
            assert reply.status == 404


async def test_a_service_that_is_gone_is_told(site: Site) -> None:
    site.race.sides[0].lanes[0].response_id = RESPONSE_ID
    async with site.get("/explain/0/0") as reply:
        assert reply.status == 503


def test_a_process_of_another_program_is_never_killed(tmp_path: Path) -> None:
    service = LiveService("0-fcfs", tmp_path, {})
    with pytest.raises(FarsightError, match="process 1 does not belong to the service"):
        service._kill(1)
