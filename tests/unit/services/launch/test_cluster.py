"""What a private cluster leaves behind; Ray itself is not started."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ray._private import parameter

from services.launch import cluster
from services.launch.ports import free_ports, reserved_ports


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "farsight-x"
    found.mkdir()
    (found / "log").touch()
    return found


def test_a_file_that_comes_while_the_directory_is_removed_goes_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals: list[Path] = []
    remove = shutil.rmtree

    def removing(path: Path, **options: Any) -> None:
        remove(path, **options)
        if not removals:
            path.mkdir()
            (path / "late").touch()
        removals.append(path)

    monkeypatch.setattr(shutil, "rmtree", removing)
    cluster.remove_directory(directory)
    assert removals == [directory, directory]
    assert not directory.exists()


def test_a_directory_that_cannot_be_removed_holds_nobody_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)
    monkeypatch.setattr(cluster, "_REMOVE_S", 0.01)
    cluster.remove_directory(directory)
    assert directory.exists()


def test_the_agents_of_ray_get_ports_that_nobody_else_of_the_cluster_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left to them: Ray would wait for their choice, but not for long."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(parameter, "RayParams", lambda **settings: made.append(settings))
    with reserved_ports() as ports:
        taken = free_ports(ports, 1)[0]
        with cluster.few_daemons(ports):
            parameter.RayParams(metrics_export_port=None, num_cpus=2)
    (settings,) = made
    agents = [value for name, value in settings.items() if name.endswith("_port")]
    assert len(set(agents)) == len(agents) == 4
    assert set(agents) <= set(ports) - {taken}
    assert settings["num_cpus"] == 2
