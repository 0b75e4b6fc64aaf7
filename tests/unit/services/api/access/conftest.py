from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.access.access_support import LONG_S, GuardedServer, guarded_server


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory, encoder: PromptEncoder) -> Iterator[GuardedServer]:
    """One server for all tests of this folder. It ends with them: other tests replace clocks of the whole process."""
    with guarded_server(tmp_path_factory.mktemp("keys"), encoder, failures_per_minute=200) as server:
        yield server


@pytest.fixture
def http(guarded: GuardedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.base_url, timeout=LONG_S) as client:
        yield client
