"""The log on a Redis server: only on one that keeps what it is given; a lost connection loses and repeats nothing."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import redis

from farsight.actors.log.log_redis import PREFIX, REDIS_SCHEMA_VERSION, without_password
from farsight.actors.log.log_store import LogStore
from farsight.core.errors import ConfigError, FarsightError
from tests.unit.actors.components import (
    append,
    append_forecasts,
    append_traces,
    component_context,
    example_ids,
    finished,
    forecast_record,
    opened,
    read_ids,
    trace,
)
from tests.unit.actors.redis_server import redis_server


async def refusal(url: str, restarts: int = 0) -> ConfigError:
    """What a store says that cannot start."""
    store = LogStore(component_context("log-store", path=url, restarts=restarts))
    with pytest.raises(ConfigError) as caught:
        await store.start()
    await store.stop()
    assert caught.value.field == "log.path"
    return caught.value


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"appendonly": "no"}, "its setting appendonly is 'no', expected 'yes': it may lose acknowledged writes"),
        ({"appendfsync": "everysec"}, "its setting appendfsync is 'everysec', expected 'always'"),
        ({"no_appendfsync_on_rewrite": "yes"}, "its setting no-appendfsync-on-rewrite is 'yes', expected 'no'"),
        ({"maxmemory": "100mb", "maxmemory_policy": "allkeys-lru"}, "its maxmemory-policy is 'allkeys-lru': it drops"),
        ({"rename_command": "CONFIG hidden"}, "its setting appendonly cannot be read: unknown command"),
    ],
)
async def test_a_server_that_may_lose_records_is_refused_and_left_alone(
    tmp_path: Path, settings: dict[str, str], reason: str
) -> None:
    with redis_server(tmp_path, **settings) as server:
        for restarts in (0, 1):
            assert reason in str(await refusal(server.url, restarts))
        with redis.Redis.from_url(server.url) as client:
            assert client.dbsize() == 0


async def test_eviction_of_keys_that_expire_is_none_of_a_log(tmp_path: Path) -> None:
    with redis_server(tmp_path, maxmemory="100mb", maxmemory_policy="volatile-lru") as server:
        async with opened(path=server.url) as store:
            await append(store, finished("a"))


async def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set(f"{PREFIX}version", REDIS_SCHEMA_VERSION + 1)
        assert f"a log of version {REDIS_SCHEMA_VERSION + 1}, expected" in str(await refusal(server.url))


async def test_every_key_has_the_prefix_and_databases_are_apart(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with opened(path=server.url) as store, opened(path=server.url.replace("/0", "/1")) as other:
            await append(store, finished("a"))
            await append_forecasts(store, forecast_record("a"))
            assert await read_ids(other) == []
        with redis.Redis.from_url(server.url) as client:
            assert all(key.startswith(PREFIX.encode()) for key in client.scan_iter())


async def test_nothing_grows_beyond_the_limit(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with opened(path=server.url, max_rows=5) as store:
            for i in range(30):
                await append_forecasts(store, forecast_record(f"{i}"), forecast_record(f"never-{i}"))
                await append(store, finished(f"{i}"), finished(f"unpredicted-{i}"))
                await append_traces(store, trace(f"cmpl-{i}"), trace(f"cmpl-{i}", part="ingress"))
        with redis.Redis.from_url(server.url) as client:
            for kind, at_most in (("requests", 5), ("forecasts", 5), ("examples", 3)):
                assert 0 < client.xlen(PREFIX + kind) <= at_most
                assert client.hlen(f"{PREFIX}{kind}:rows") == client.xlen(PREFIX + kind)
            assert client.xlen(f"{PREFIX}traces") == client.hlen(f"{PREFIX}traces:rows") == 5
            assert client.zcard(f"{PREFIX}traces:ids") == 5
            assert len(list(client.scan_iter())) == 11, "four streams and hashes, trace ids, last rows and the version"


async def test_two_stores_share_one_log(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with opened(path=server.url, max_rows=5) as store, opened(path=server.url, max_rows=5) as other:
            for i in range(4):
                await append(store, finished(f"{i}-a"), finished(f"{i}"))
                await append(other, finished(f"{i}-b"), finished(f"{i}"))
            assert await read_ids(store) == await read_ids(other) == ["2", "2-b", "3-a", "3", "3-b"]


async def test_many_appends_at_once_share_a_write(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with opened(path=server.url) as store:
            await asyncio.gather(*(append(store, finished(f"{i}")) for i in range(100)))
            assert len(await read_ids(store)) == 100
        with redis.Redis.from_url(server.url) as client:
            calls = client.info("commandstats")
        assert calls["cmdstat_evalsha"]["calls"] - calls["cmdstat_evalsha"]["failed_calls"] <= 3


async def test_a_server_that_is_away_is_told_and_found_again(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with opened(path=server.url) as store:
            await append(store, finished("a"))
            server.kill()
            for call in (append(store, finished("b")), append(store, finished("c")), append(store, finished("c"))):
                with pytest.raises(FarsightError, match="log-store cannot write: "):
                    await call
            with pytest.raises(FarsightError, match="log-store cannot read: "):
                await read_ids(store)
            assert store.queue == 0
            server.start()
            await append(store, finished("a"), finished("b"))
            assert await read_ids(store) == ["a", "b"]
            assert not store.failed.done()


async def test_at_a_restart_it_waits_for_a_server_that_is_away(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        server.kill()
        assert "can keep the log" in str(await refusal(server.url))
        store = LogStore(component_context("log-store", path=server.url, restarts=1))
        await store.start()
        with pytest.raises(FarsightError, match="log-store cannot write"):
            await append(store, finished("a"))
        server.start()
        await append(store, finished("a"))
        assert await read_ids(store) == ["a"]
        await store.stop()


async def test_a_server_that_comes_back_with_less_care_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with opened(path=server.url) as store:
            await append(store, finished("a"))
            with redis.Redis.from_url(server.url) as client:
                client.config_set("appendfsync", "everysec")
                client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(FarsightError, match="cannot write: "):  # over the connection that is gone
                await append(store, finished("b"))
            for _ in range(2):
                with pytest.raises(FarsightError, match="cannot write: its setting appendfsync is 'everysec'"):
                    await append(store, finished("b"))
            with redis.Redis.from_url(server.url) as client:
                client.config_set("appendfsync", "always")
            await append(store, finished("c"))
            assert await read_ids(store) == ["a", "c"]


async def test_a_full_server_refuses_a_message_as_a_whole(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with opened(path=server.url) as store:
            await append(store, finished("a"))
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory", 1000)
            with pytest.raises(FarsightError, match=r"cannot write: .*memory"):
                await append(store, finished("b"), finished("c"))
            async with opened(path=server.url) as reader:
                assert await read_ids(reader) == ["a"]
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory", 0)
            await append_forecasts(store, forecast_record("b"))
            assert (await read_ids(store), await example_ids(store)) == (["a"], [])


async def test_without_the_client_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "farsight.actors.log.log_redis")
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "redis.asyncio")
    assert "farsight[redis]" in str(await refusal("redis://:secret@127.0.0.1:1/0"))


def test_where_tests_count_a_missing_server_is_no_excuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for value, outcome in (("1", pytest.fail.Exception), ("", pytest.skip.Exception)):
        monkeypatch.setenv("CI", value)
        with pytest.raises(outcome, match="apt-get install redis-server"), redis_server(tmp_path):
            pass


async def test_no_error_shows_a_password() -> None:
    for url in ("redis://user:secret@127.0.0.1:1/0", "redis://:secret@127.0.0.1:1/no-number"):
        assert "secret" not in str(await refusal(url))
    assert without_password("redis://u:p@host:1/2?password=p") == "redis://***@host:1/2"
    assert without_password("rediss://host/2") == "rediss://host/2"
