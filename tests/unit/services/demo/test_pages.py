"""The demo's address: what it shows, and that no other page can read it or kill a process through it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from core.errors import FarsightError
from services.demo.live_service import LiveService
from services.demo.pages import TOKEN_HEADER, DemoPages
from services.demo.race import Race
from tests.free_ports import free_port
from tests.unit.services.demo.test_race import arrivals

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
    """The running pages."""

    def __init__(self, pages: DemoPages, race: Race, services: list[FakeService], url: str) -> None:
        self.pages, self.race, self.services, self.url = pages, race, services, url
        self.headers = {"Origin": url, TOKEN_HEADER: pages.token}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    race, port = Race(("fcfs", "farsight"), arrivals(3)), free_port()
    services = [FakeService(f"{side}-{preset}", tmp_path, {}) for side, preset in enumerate(("fcfs", "farsight"))]
    async with aiohttp.ClientSession() as session:
        pages = DemoPages(race, list(services), session, port)
        runner = web.AppRunner(pages.app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield Site(pages, race, services, f"http://127.0.0.1:{port}")
        await runner.cleanup()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_the_page_needs_nothing_from_elsewhere(site: Site, client: aiohttp.ClientSession) -> None:
    async with client.get(site.url) as reply:
        page, policy = await reply.text(), reply.headers["Content-Security-Policy"]
    assert site.pages.token in page and "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"""(src|href)=["']https?:""", page)


async def test_the_view_is_json_of_both_sides(site: Site, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{site.url}/race") as reply:
        view = await reply.json()
    assert [side["preset"] for side in view["sides"]] == ["fcfs", "farsight"]
    assert view["elapsed_s"] is None and view["sides"][0]["lanes"] == []


async def test_the_pages_own_button_kills_once(site: Site, client: aiohttp.ClientSession) -> None:
    async with client.post(f"{site.url}/kill/1", headers=site.headers) as reply:
        assert (reply.status, await reply.json()) == (200, {"pid": 4321})
    async with client.post(f"{site.url}/kill/1", headers=site.headers) as reply:
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
async def test_a_strange_page_kills_nothing(site: Site, client: aiohttp.ClientSession, change: dict[str, str]) -> None:
    async with client.post(f"{site.url}/kill/1", headers=site.headers | change) as reply:
        assert reply.status == 403
    assert site.services[1].num_killed == 0


async def test_a_rebound_name_reads_nothing(site: Site, client: aiohttp.ClientSession) -> None:
    for path in ("/", "/race", "/explain/0/0"):
        async with client.get(site.url + path, headers={"Host": "evil.example"}) as reply:
            assert reply.status == 403 and site.pages.token not in await reply.text()


async def test_addresses_that_do_not_exist(site: Site, client: aiohttp.ClientSession) -> None:
    for path, status in (("/kill/2", 404), ("/kill/x", 404)):
        async with client.post(site.url + path, headers=site.headers) as reply:
            assert reply.status == status
    for path in ("/explain/0/0", "/explain/1/9999", "/explain/0/-1", "/explain/2/0"):
        async with client.get(site.url + path) as reply:
            assert reply.status == 404


async def test_a_service_that_is_gone_is_told(site: Site, client: aiohttp.ClientSession) -> None:
    site.race.sides[0].lanes[0].response_id = RESPONSE_ID
    async with client.get(f"{site.url}/explain/0/0") as reply:
        assert reply.status == 503


def test_a_process_of_another_program_is_never_killed(tmp_path: Path) -> None:
    service = LiveService("0-fcfs", tmp_path, {})
    with pytest.raises(FarsightError, match="process 1 does not belong to the service"):
        service._kill(1)
