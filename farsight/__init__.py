"""Farsight serves large language models and looks ahead.

The Python API:

- ``LLM``, ``AsyncLLM``: a model in this process, with ``SamplingParams``; they return ``RequestOutput``.
- ``Server``: a server beside this process, as ``farsight serve`` starts it.
- ``simulate``, ``compare``: schedulers in virtual time.
- ``explain``: the decisions about an answer of a running server.
- ``FarsightError``: the base of all errors that are raised on purpose.

Each is loaded when it is first asked for: ``import farsight`` costs nothing. The folders here are links to the rooms of
the repository, one for each layer; an installed Farsight holds the rooms themselves.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farsight.core.errors import FarsightError
    from farsight.explaining import explain
    from farsight.llm import LLM, AsyncLLM
    from farsight.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ToolCall,
    )
    from farsight.sampling import SamplingParams
    from farsight.server import Server
    from farsight.study import compare, simulate

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FarsightError",
    "RequestOutput",
    "SamplingParams",
    "Server",
    "ToolCall",
    "compare",
    "explain",
    "simulate",
]

_OUTPUTS = ("CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "RequestOutput", "ToolCall")
_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "llm",
    "FarsightError": "core.errors",
    "SamplingParams": "sampling",
    "Server": "server",
    "compare": "study",
    "explain": "explaining",
    "simulate": "study",
    **dict.fromkeys(_OUTPUTS, "outputs"),
}


def __getattr__(name: str) -> Any:
    """Loads what is asked for, from the module of this package that has it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
