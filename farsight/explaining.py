"""The decisions about an answer of a running server."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING

from farsight.services.commands.ask import ask, key_for

if TYPE_CHECKING:
    from farsight.services.api.pages.explain import Explanation

TIMEOUT_S = 10.0


def explain(response_id: str, *, url: str = "http://127.0.0.1:8000", api_key: str | None = None) -> Explanation:
    """Returns every decision about an answer, with its time, a sentence and the numbers behind it.

    Args:
        response_id: The ``id`` of the answer, as ``chatcmpl-...``.
        url: Address of the server.
        api_key: The key that the request was sent with; by default the admin token of a server of this user here.

    Raises:
        FarsightError: No server answers, or it does not know the answer.
    """
    from farsight.services.api.pages.explain import Explanation

    path = f"/v1/requests/{urllib.parse.quote(response_id, safe='')}"
    return Explanation.model_validate(ask(url.rstrip("/"), path, TIMEOUT_S, key_for(url, api_key)))
