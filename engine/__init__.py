"""The torch engine: model, paged KV pool, attention, sampler. Usable alone: ``from farsight.engine import Engine``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farsight.engine.engine import Engine, RequestOutput

__all__ = ["Engine", "RequestOutput"]


def __getattr__(name: str) -> Any:
    """Loads the engine when it is asked for: processes that only read a model's configuration stay without torch."""
    if name in __all__:
        from farsight.engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
