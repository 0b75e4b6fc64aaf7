"""The torch engine: model, paged KV pool, attention, sampler. Usable alone: ``from engine import Engine``."""

from typing import TYPE_CHECKING, Any

from farsight_rooms import check_rooms

if TYPE_CHECKING:
    from engine.engine import Engine, RequestOutput

__all__ = ["Engine", "RequestOutput"]

check_rooms()


def __getattr__(name: str) -> Any:
    """Loads the engine when it is asked for: processes that only read a model's configuration stay without torch."""
    if name in __all__:
        from engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
