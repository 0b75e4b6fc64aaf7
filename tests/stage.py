"""The one place where tests have a Ray, a service in it or a server open; before the next one opens, it is closed.

``on_stage`` makes a fixture of what opens one. Tests that need the same run one after the other, so each
opens once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_FIXTURES: dict[str, tuple[int, Callable[[Any], str]]] = {}
"""For each fixture of the stage: its level, and the key of what it opens from its parameter."""


class Stage:
    """What is open, the outermost first: a Ray is below the service in it."""

    def __init__(self) -> None:
        self._open: list[tuple[str, ExitStack, Any]] = []

    def use(self, key: str, opener: Callable[[], AbstractContextManager[T]], *, level: int = 0) -> T:
        """Returns what is open under that key, or closes what stands in its place and opens it.

        Args:
            level: 0 for what stands alone, 1 for a service in the Ray of level 0.
        """
        if len(self._open) > level and self._open[level][0] == key:
            found: T = self._open[level][2]
            return found
        self.clear(level)
        assert len(self._open) == level, "a service needs a Ray below it"
        with ExitStack() as stack:
            value = stack.enter_context(opener())
            self._open.append((key, stack.pop_all(), value))
        return value

    def clear(self, level: int = 0) -> None:
        """Closes what is open from that level on, the innermost first."""
        while len(self._open) > level:
            self._open.pop()[1].close()


STAGE = Stage()


@pytest.fixture
def stage() -> Stage:
    return STAGE


def on_stage(*, level: int = 0, **params: Any) -> Callable[[Callable[..., Iterator[T]]], Any]:
    """Makes a fixture of a generator that opens something, yields it and closes it; it stays open for later tests.

    Args:
        level: As in ``Stage.use``.
        params: As of ``pytest.fixture``; each parameter opens something of its own.
    """

    def wrap(opener: Callable[..., Iterator[T]]) -> Any:
        name = opener.__name__
        names = list(inspect.signature(opener).parameters)

        def key_of(param: Any) -> str:
            return name if param is None else f"{name} {param}"

        def find(stage: Stage, request: pytest.FixtureRequest, **fixtures: Any) -> T:
            used = {each: request if each == "request" else fixtures[each] for each in names}
            key = key_of(getattr(request, "param", None))
            return stage.use(key, lambda: contextmanager(opener)(**used), level=level)

        _FIXTURES[name] = level, key_of
        find.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY)
                for each in {"stage": 0, "request": 0} | dict.fromkeys(names)
            ]
        )
        return pytest.fixture(name=name, **params)(find)

    return wrap


def forwards(name: str, level: int, key_of: Callable[[Any], str]) -> None:
    """Declares that a fixture's parameter names another fixture of the stage, which it asks for."""
    _FIXTURES[name] = level, key_of


def needs_of(item: pytest.Item) -> tuple[int, str] | None:
    """Returns the innermost thing that the test needs open, as level and key; None if it needs nothing."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    names = getattr(item, "fixturenames", ())
    found = []
    for name in names:
        if name in _FIXTURES and "stage" in names:  # else a module has a fixture of its own of that name
            level, key_of = _FIXTURES[name]
            found.append((level, key_of(params.get(name))))
    return max(found, default=None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    needs = needs_of(item)
    STAGE.clear(0 if needs is None else needs[0] + 1)


@pytest.fixture(scope="session", autouse=True)
def _the_stage_is_empty_at_the_end() -> Iterator[None]:
    yield
    STAGE.clear()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts tests so that those which need the same are together, else as they were."""
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(needs_of(item) or item.path, []).append(item)
    items[:] = [item for group in groups.values() for item in group]
