"""Replaces the weights of all replicas, or their workers' settings, while they serve; a stream stays on its version."""

from __future__ import annotations

import asyncio
import dataclasses
import filecmp
import json
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import ray

from farsight.actors.runtime.names import (
    LENGTH_PREDICTOR,
    kind_of,
    own_replicas,
    rank_of,
    replica_of,
    scheduler_name,
    wanted_components,
)
from farsight.actors.runtime.peer import Site
from farsight.actors.runtime.watching import ClusterStore
from farsight.actors.supervision.autoscaling import without_drains
from farsight.actors.supervision.ingress_reports import IngressReports
from farsight.core.codec import decode, encode
from farsight.core.config.load import FarsightConfig
from farsight.core.config.rolling import (
    READERS,
    Changes,
    at_once,
    changed,
    differing,
    merged,
    of_replicas,
    readers,
    rolling_settings,
)
from farsight.core.errors import FarsightError, InvalidValueError, MessageError
from farsight.core.messages.status import ComponentCounts
from farsight.core.messages.supervision import ServedWeights, Upgrade, WeightsState

LOOK_S = 0.1
SWITCH_S = 1.5
"""Seconds from the decision to the switch of new requests: three reports of an ingress replica, so all know of it."""

HEARD_S = 10.0
"""Seconds in which every ingress replica that lives has heard of a change."""

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that ingress replicas read once: an upgrade may not change them."""

_RENEWED = frozenset(kind for kinds in READERS.values() for kind in kinds)
_STATE = "weights"
_MAX_CONFIG_BYTES = 1 << 20


class RollingUpgrade:
    """The weights and settings of each replica, and the change from one version of them to the next.

    Each step is stored before it is taken, so a later Supervisor goes on where this one ended. The order of the steps:
    one more replica starts on the new weights; half of the others follow, one after the other, while their requests
    move to the rest; then new requests go to the new weights; then the rest follows, the last replica when every
    request on the old weights has ended. Components of the whole service that read changed settings start again after
    the switch; every other component takes their end for a death.

    Args:
        model_dir: Model directory that the service started with.
        counts: Returns the desired numbers of components.
        change: Sets the desired numbers; raises FarsightError if a component cannot start.
        renew: Ends a component, which then starts again with the site that ``site_of`` returns.
    """

    def __init__(
        self,
        store: ClusterStore,
        model_dir: str,
        ingresses: IngressReports,
        counts: Callable[[], ComponentCounts],
        change: Callable[[ComponentCounts], Awaitable[None]],
        renew: Callable[[str], Awaitable[None]],
    ) -> None:
        self._store = store
        self._ingresses = ingresses
        self._counts = counts
        self._change = change
        self._renew = renew
        self.state = WeightsState(((0, model_dir),))
        self._switch_at = -math.inf

    async def load(self) -> None:
        """Loads the state that an earlier Supervisor has stored."""
        data = await self._store.get(_STATE)
        if data is not None:
            self.state = decode(data, WeightsState)

    @property
    def is_under_way(self) -> bool:
        return bool(self.state.version_of or self.state.renewed)

    def served(self) -> ServedWeights:
        state = self.state
        return ServedWeights(state.current, state.dir_of(state.current))

    def site_of(self, name: str, site: Site) -> Site:
        """Returns the site that a host or component starts with; a part of a replica gets that replica's version."""
        rank = rank_of(name)
        if rank is not None:
            version = self.state.of(rank[0])
            config = self._config_of(version, site.config)
            return dataclasses.replace(site, config=config, model_dir=self.state.dir_of(version), model_version=version)
        if name.startswith(scheduler_name("")):
            return dataclasses.replace(site, config=self._config_of(self.state.of(replica_of(name)), site.config))
        if kind_of(name) not in _RENEWED:
            return site
        config = self._config_of(self.state.current, site.config)
        return dataclasses.replace(site, config=config, model_since=self.state.since)

    def _config_of(self, version: int, config: FarsightConfig) -> FarsightConfig:
        return changed(config, json.loads(self.state.settings_of(version)))

    def switch_in_s(self) -> float:
        """Returns the seconds until new requests run on the current version; 0 after a restart of the Supervisor."""
        return max(0.0, self._switch_at - time.monotonic())

    def limits(self) -> str:
        """Returns the settings that ingress replicas take over without a restart, as JSON."""
        return at_once(self.state.settings_of(self.state.current))

    async def begin(self, order: Upgrade, config: FarsightConfig) -> bool:
        """Stores that an upgrade is under way and changes nothing else. Returns False if no step
        is left: everything is as ordered already, or the new settings need no restart of a component.

        Args:
            config: The configuration that the service started with.

        Raises:
            MessageError: The new model cannot take the place of the running one, or a setting cannot roll.
        """
        state = self.state
        settings = running = state.settings_of(state.current)
        if order.settings:
            settings = new_settings(config, json.loads(running), order.settings)
            if not order.model_dir and of_replicas(settings) == of_replicas(running):
                if settings != running:
                    await self._save(state.with_settings(settings, readers(running, settings)))
                return self.is_under_way
        counts = self._counts()
        replicas = own_replicas(counts)
        if not replicas:
            raise MessageError("model", order.model_dir, "no upgrade: no replica of our own engine runs")
        if order.model_dir or not order.settings:
            await asyncio.to_thread(check_model, Path(state.dir_of(state.current)), order.model_dir)
        surge = str(counts.replicas) if order.surge else ""
        renewed = set(readers(running, settings)) | ({LENGTH_PREDICTOR} if order.model_dir else set())
        await self._save(state.begun(order.model_dir, settings, replicas, surge, order.drain_s, tuple(sorted(renewed))))
        return True

    async def run(self) -> None:
        """Takes all steps that are left.

        Raises:
            FarsightError: A replica cannot start on the new weights; all replicas run on the old weights again.
        """
        if self.state.target != self.state.current:
            try:
                await self._before_switch()
            except FarsightError:
                await self._go_back()
                raise
            self._switch_at = time.monotonic() + SWITCH_S
            await self._save(dataclasses.replace(self.state, current=self.state.target))
        await self._until_heard(self._ingresses.model_version)
        if not self.state.since_of_current:
            await self._save(dataclasses.replace(self.state, since=time.time(), since_of_current=True))
        await self._renew_readers()
        await self._after_switch()

    async def _before_switch(self) -> None:
        state, counts = self.state, self._counts()
        if state.surge and counts.replicas <= int(state.surge):
            await self._change(dataclasses.replace(counts, replicas=int(state.surge) + 1))
        replicas = self._rolled()
        for replica in replicas[: len(replicas) // 2]:
            await self._restart(replica, state.target)

    async def _after_switch(self) -> None:
        target = self.state.target
        old = [replica for replica in self._rolled() if self._is_left(replica)]
        for replica in old[:-1]:
            await self._restart(replica, target)
        for replica in old[-1:]:
            await self._end_old_requests()
            await self._restart(replica, target)
        if self.state.surge and self._counts().replicas > int(self.state.surge):
            await self._change(dataclasses.replace(self._counts(), replicas=int(self.state.surge)))
        await self._save(self.state.ended())

    async def _end_old_requests(self) -> None:
        """Waits until the last request on old weights has ended; requests that take too long end with an error."""
        if not await self._until(self._ingresses.oldest_version, self.state.drain_s):
            await self._save(dataclasses.replace(self.state, oldest=self.state.target))
            await self._until_heard(self._ingresses.oldest_version)

    async def _go_back(self) -> None:
        """Puts every replica back on the old weights and ends the additional replica."""
        state = self.state
        for replica in self._rolled():
            if state.of(replica) == state.target:
                await self._restart(replica, state.current)
        if state.surge and self._counts().replicas > int(state.surge):
            await self._change(dataclasses.replace(self._counts(), replicas=int(state.surge)))
        await self._save(self.state.ended())

    async def _renew_readers(self) -> None:
        """Restarts the components that read changed settings; LengthPredictors forget lengths under other weights."""
        for component in wanted_components(self._counts()):
            if kind_of(component) in self.state.renewed:
                await self._renew(component)
        await self._save(dataclasses.replace(self.state, renewed=()))

    def _rolled(self) -> list[str]:
        """Returns the replicas that served when the upgrade began."""
        return [replica for replica, _ in self.state.version_of if replica != self.state.surge]

    def _is_left(self, replica: str) -> bool:
        return self.state.of(replica) != self.state.target or replica in self._counts().drained

    async def _restart(self, replica: str, version: int) -> None:
        """Ends the processes of a replica, whose requests move, and starts them on other weights."""
        counts = without_drains(self._counts(), replica)
        await self._change(dataclasses.replace(counts, drained=(*counts.drained, replica)))
        await self._save(self.state.with_replica(replica, version))
        await self._change(counts)

    async def _until_heard(self, version: Callable[[], int | None]) -> None:
        await self._until(version, HEARD_S)

    async def _until(self, version: Callable[[], int | None], seconds: float) -> bool:
        """Returns whether all ingress replicas reached the target version within ``seconds``."""
        deadline = time.monotonic() + seconds
        while (seen := version()) is None or seen < self.state.target:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def _save(self, state: WeightsState) -> None:
        self.state = state
        await self._store.put(_STATE, encode(state))


def new_settings(config: FarsightConfig, before: Changes, tables: str) -> str:
    """Returns the settings that are to differ from those of the start, by section, as JSON with sorted keys.

    Args:
        config: The configuration that the service started with.
        before: Earlier changes of that configuration.
        tables: Tables of a configuration file, as JSON.

    Raises:
        MessageError: A setting is wrong, or cannot roll.
    """
    try:
        wanted = json.loads(tables)
        if not isinstance(wanted, dict):
            raise MessageError("config", wanted, "tables of settings")
        found = merged(before, rolling_settings(changed(config, before), wanted))
    except InvalidValueError as error:
        raise MessageError(error.field, error.value, error.expected) from error
    return differing(config, found)


def check_room(config: FarsightConfig) -> None:
    """Raises MessageError if one more replica would wait for a GPU for ever."""
    needed = config.model.num_ranks * config.gpus_per_rank
    if not needed:
        return
    free = ray.available_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    if free < needed:
        raise MessageError("surge", True, f"{needed:g} free GPUs for one more replica, not {free:g}; `--no-surge`")


def check_model(running: Path, wanted: str) -> None:
    """Raises MessageError unless the wanted model is a directory with the text side of the running one."""
    path = Path(wanted)
    if not path.is_absolute() or not path.is_dir() or not running.is_dir():
        expected = "the absolute path of a model directory on the machine of the service, which runs one as well"
        raise MessageError("model", wanted, expected)
    for name in TEXT_FILES:
        if not _same(running / name, path / name):
            expected = f"a model with the tokenizer of the running one ({name} differs); for another one start again"
            raise MessageError("model", wanted, expected)
    if _vocab_size(path) != _vocab_size(running):
        raise MessageError("model", wanted, "a model with the vocab_size of the running one (config.json)")


def _same(one: Path, other: Path) -> bool:
    if not one.is_file() or not other.is_file():
        return not one.exists() and not other.exists()
    return filecmp.cmp(one, other, shallow=False)


def _vocab_size(directory: Path) -> object:
    """Reads ``vocab_size`` from config.json; None if the file is missing or cannot be read."""
    file = directory / "config.json"
    try:
        if not file.is_file() or file.stat().st_size > _MAX_CONFIG_BYTES:
            return None
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return config.get("vocab_size") if isinstance(config, dict) else None
