"""Farsight serves large language models and looks ahead.

The folders here are links to the rooms of the repository, one for each layer; an installed Farsight holds the rooms
themselves. So ``farsight.core`` is the one name of the room ``core``, in a checkout as in any environment.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farsight.core.request import SamplingParams
    from farsight.engine.engine import Engine, RequestOutput

__all__ = ["Engine", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Loads what is asked for: torch comes with ``Engine`` alone."""
    if name == "SamplingParams":
        from farsight.core.request import SamplingParams

        return SamplingParams
    if name in __all__:
        from farsight import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
