"""How a job finds its cluster; Ray itself is not started."""

from __future__ import annotations

import psutil
import pytest

from core.config.load import FarsightConfig
from services.batch import backend


class Relative:
    def __init__(self, *words: str) -> None:
        self._words = words

    def cmdline(self) -> list[str]:
        if not self._words:
            raise psutil.AccessDenied
        return list(self._words)

    def parents(self) -> list[Relative]:
        return [Relative("ray::JobSupervisor"), self, Relative("/sbin/init")]


@pytest.mark.parametrize(
    ("raylet", "address"),
    [
        (Relative("/x/raylet", "--worker=python --gcs-address=no", "--gcs-address=127.0.0.1:7"), "127.0.0.1:7"),
        (Relative("bash"), None),
        (Relative(), None),
    ],
)
def test_the_raylet_above_the_job_knows_its_cluster(
    monkeypatch: pytest.MonkeyPatch, raylet: Relative, address: str | None
) -> None:
    monkeypatch.setattr(psutil, "Process", lambda: raylet)
    assert backend._cluster_address() == address


def test_each_job_has_names_of_its_own_that_end_with_it() -> None:
    one, other = backend._own_site(FarsightConfig()), backend._own_site(FarsightConfig())
    assert one.namespace != other.namespace
    assert not one.detached
