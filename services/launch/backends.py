"""Checks replicas that are external servers before anything starts: do they answer, with the right model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from farsight.actors.external.openai_wire import BackendFailed
from farsight.core.config.actors import ReplicaConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.errors import ConfigError
from farsight.policies.compose import is_batch_mode
from farsight.services.launch.cluster import ServiceFailed

LOOK_S = 15.0
"""Seconds to wait for the first answers. A server that does not answer in time is left out until it does."""


def check_replicas(config: FarsightConfig) -> None:
    """Refuses settings that external servers cannot serve.

    Raises:
        ConfigError: A setting is wrong; names the field.
    """
    if config.replica and is_batch_mode(config.scheduler.preset):
        expected = f"none with preset {config.scheduler.preset!r}: batches are formed for workers of our own engine"
        raise ConfigError("replica", [each.url for each in config.replica], expected)
    for each in config.replica:
        from farsight.actors.external.openai_server import find_api_key  # aiohttp: only where there are some

        find_api_key(each)


def look_for_servers(config: FarsightConfig, model: str, say: Callable[[str], None]) -> None:
    """Asks each server once and reports the result; ``model`` is the name that Farsight's clients use.

    Raises:
        ServiceFailed: No server can be used and there is no replica of the own engine.
    """
    problems = asyncio.run(_ask_all(config, model))
    for index, (each, problem) in enumerate(zip(config.replica, problems, strict=True)):
        say(f"Replica backend-{index} is {each.url}: {problem or 'it answers'}.")
    if config.replica and not config.model.replicas and all(problems):
        raise ServiceFailed("none of the servers in [[replica]] can be used")


async def _ask_all(config: FarsightConfig, model: str) -> list[str]:
    return await asyncio.gather(*(_ask(each, model) for each in config.replica))


async def _ask(config: ReplicaConfig, model: str) -> str:
    """The problem with the server; empty if there is none."""
    from farsight.actors.external.openai_server import OpenAIServer, find_api_key

    server = OpenAIServer(config, config.model or model, lambda ids, before: "", find_api_key(config))
    await server.open()
    try:
        async with asyncio.timeout(LOOK_S):
            await server.probe(generates=True)
    except BackendFailed as error:
        return error.failure.message
    except TimeoutError:
        return f"no answer within {LOOK_S:g} s"
    finally:
        await server.close()
    return ""
