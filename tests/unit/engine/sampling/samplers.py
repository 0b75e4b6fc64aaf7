"""What tests of sampling share: both samplers, and histories as a list of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from farsight.core.request import SamplingParams
from farsight.engine.native.sampler import NativeSampler
from farsight.engine.sampling.sampler import Sampler
from farsight.engine.sequence import TokenCounts

MakeSampler = Callable[..., Sampler]

SAMPLERS: dict[str, MakeSampler] = {"torch": Sampler, "native": NativeSampler}

each_sampler = pytest.mark.parametrize("make_sampler", SAMPLERS.values(), ids=SAMPLERS)


@dataclass
class History:
    token_ids: list[int]
    prompt_len: int

    def token_counts(self) -> TokenCounts:
        return TokenCounts(self.token_ids, self.prompt_len)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 50} | options)
