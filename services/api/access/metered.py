"""Requests that belong to the tenant of the caller: salt, owner, priority and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from farsight.core.errors import CapacityError, InvalidValueError
from farsight.core.images import EncodedImage, ImageFile
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request
from farsight.services.api.access.access_control import AccessControl
from farsight.services.api.access.keys import CURRENT, Caller, owner_of, salt_of
from farsight.services.api.backend import Generator, ModelInfo
from farsight.services.api.generation import PromptText, first_cached_len


class MeteredGenerator:
    """Runs requests on another generator for the caller's tenant; routes need not know about tenants.

    Args:
        shares_prefixes: Whether tenants share cached prefixes with each other.
    """

    def __init__(self, generator: Generator, access: AccessControl, *, shares_prefixes: bool) -> None:
        self._generator = generator
        self._access = access
        self._shares_prefixes = shares_prefixes

    @property
    def model(self) -> ModelInfo:
        return self._generator.model

    def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        """As ``Generator.stream``; tokens count for the caller's tenant as they come.

        Where keys are in use, the tenant's name is the ``key`` that requests in flight are counted by.
        """
        caller = CURRENT.get()
        if caller is None:
            return self._generator.stream(request, text, key)
        deltas = self._generator.stream(self._owned(request, caller), text, caller.tenant.name)
        # The prompt of a request that goes on has been counted.
        return self._counted(deltas, 0 if request.output_ids else request.prompt_len, caller)

    def _owned(self, request: Request, caller: Caller) -> Request:
        """The request with the tenant of the caller: its share, priority, owner and cache salt."""
        origin, salt = request.origin, request.cache_salt
        return dataclasses.replace(
            request,
            priority=caller.tenant.priority(request.priority),
            origin=None if origin is None else dataclasses.replace(origin, owner=owner_of(caller.identity)),
            cache_salt=salt if self._shares_prefixes else salt_of(caller.identity, salt),
            tenant=caller.tenant.name,
            weight=caller.tenant.weight,
        )

    async def _counted(
        self, deltas: AsyncGenerator[TokenDelta, None], prompt: int, caller: Caller
    ) -> AsyncGenerator[TokenDelta, None]:
        """Counts the prompt unless the backend refuses it, and each token when it comes."""
        budget, now = self._access.budget(caller.tenant), self._access.now
        output, gpu_s = 0, 0.0
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    output += delta.num_tokens
                    gpu_s += delta.gpu_s
                    cached = first_cached_len(delta)
                    budget.spend(now(), output=delta.num_tokens, cached=cached, gpu_s=delta.gpu_s)
                    yield delta
        except (CapacityError, InvalidValueError):
            prompt = 0
            raise
        finally:
            budget.spend(now(), prompt=prompt)
            self._access.metrics.spent(caller.tenant.name, prompt, output, gpu_s)

    async def see(self, files: Sequence[ImageFile], salt: str) -> tuple[EncodedImage, ...]:
        """As ``Generator.see``; what is kept of a picture is shared as cached prefixes are."""
        caller = CURRENT.get()
        if caller is not None and not self._shares_prefixes:
            salt = salt_of(caller.identity, salt)
        return await self._generator.see(files, salt)
