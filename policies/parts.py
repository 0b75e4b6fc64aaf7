"""Tables in which parts register: a name, the part's declarations about itself, and the function that builds it.

Every file of a folder of parts (``FOLDERS``) registers the parts that it holds. ``load_parts`` imports these files, and
the modules that other installed packages name under the entry point group ``farsight.policies``. The composition
(``policies.compose``), the simulator and the command line ask the tables and nothing else.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from farsight.core.errors import ConfigError, InvalidValueError

PartT = TypeVar("PartT")
ContextT = TypeVar("ContextT")

ENTRY_POINT_GROUP = "farsight.policies"
FOLDERS = (
    "farsight.policies.order",
    "farsight.policies.admission",
    "farsight.policies.kv",
    "farsight.policies.placement",
    "farsight.policies.batching",
    "farsight.policies.speculation",
)


@dataclass(frozen=True, slots=True)
class RegisteredPart(Generic[PartT, ContextT]):
    """One entry of a table.

    Attributes:
        build: Makes the part from its context.
        needs: Name of the order that the part asks for more than the interface ``Order`` offers; empty for any order.
        stands_for: Name of another order whose methods this order has too: parts that need that order go with this one.
        swaps: The part moves KV to the host, so workers need a host pool.
        uses_prefixes: The part decides by what workers have cached, so workers have to tell it.
        reads_forecasts: The part decides by forecasts of single requests, so each request should have one.
        steady: The part decides the same until a request comes or ends, so a simulation need not ask it at every step.
    """

    name: str
    build: Callable[[ContextT], PartT]
    needs: str = ""
    stands_for: str = ""
    swaps: bool = False
    uses_prefixes: bool = False
    steady: bool = False
    reads_forecasts: bool = False

    @property
    def goes_as(self) -> tuple[str, ...]:
        """Names of orders that a part may need and still go together with this one."""
        return (self.name, self.stands_for) if self.stands_for else (self.name,)


class Parts(Generic[PartT, ContextT]):
    """The parts of one kind, by name.

    Args:
        setting: The setting that names one of them (``scheduler.order``), for errors.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._parts: dict[str, RegisteredPart[PartT, ContextT]] = {}

    def register(
        self,
        name: str,
        *,
        needs: str = "",
        stands_for: str = "",
        swaps: bool = False,
        uses_prefixes: bool = False,
        steady: bool = False,
        reads_forecasts: bool = False,
    ) -> Callable[[Callable[[ContextT], PartT]], Callable[[ContextT], PartT]]:
        """Decorates the function that builds the part; the keywords are those of ``RegisteredPart``.

        Raises:
            InvalidValueError: The name is taken.
        """

        def enter(build: Callable[[ContextT], PartT]) -> Callable[[ContextT], PartT]:
            if name in self._parts:
                raise InvalidValueError(self._setting, name, "a name that no other part has")
            self._parts[name] = RegisteredPart(
                name, build, needs, stands_for, swaps, uses_prefixes, steady, reads_forecasts
            )
            return build

        return enter

    def names(self, *orders: str) -> tuple[str, ...]:
        """Returns the names, sorted; with ``orders``, only of parts that go together with one of these orders."""
        load_parts()
        return tuple(sorted(name for name, part in self._parts.items() if not orders or part.needs in ("", *orders)))

    def find(self, name: str, *orders: str) -> RegisteredPart[PartT, ContextT]:
        """Returns the part of that name.

        Args:
            orders: ``goes_as`` of the order that the part has to go together with; none where there is no order.

        Raises:
            ConfigError: There is no such part, or the part needs another order; the error names the parts that fit.
        """
        load_parts()
        part = self._parts.get(name)
        if part is None:
            raise ConfigError(self._setting, name, f"one of {', '.join(self.names())}")
        if orders and part.needs not in ("", *orders):
            fitting = ", ".join(self.names(*orders))
            raise ConfigError(self._setting, name, f"one of {fitting} with the order {orders[0]!r}")
        return part


@functools.cache
def load_parts() -> None:
    """Imports everything that registers parts and presets; once a process.

    Raises:
        ConfigError: A module that an installed package names cannot be imported.
    """
    for folder in FOLDERS:
        package = importlib.import_module(folder)
        for module in pkgutil.iter_modules(package.__path__, f"{folder}."):
            importlib.import_module(module.name)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except Exception as error:  # whatever a foreign module raises while it is imported
            origin = f"{ENTRY_POINT_GROUP}: {entry.name} = {entry.value}"
            raise ConfigError(origin, f"{type(error).__name__}: {error}", "a module that can be imported") from error
