"""What a start says of a model that loads."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.runtime.peer import Site
from core.config.load import load_config
from core.messages.status import StartState
from services.launch.starting import StartingComponents


@pytest.mark.parametrize(
    ("num_bytes", "loaded", "said"),
    [
        (13 << 30, None, "tiny (13 GiB)"),
        (13 << 30, 0.404, "tiny (13 GiB), 40 % loaded"),
        (2 << 30, 0.0, "tiny (2048 MiB), 0 % loaded"),
    ],
)
def test_what_a_slow_model_waits_for(tmp_path: Path, num_bytes: int, loaded: float | None, said: str) -> None:
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", num_bytes)  # takes no room on the disk
    config = load_config(None, {"model": {"name": "tiny"}})
    handle = SimpleNamespace(call=SimpleNamespace(remote=lambda *message: None))
    starting = StartingComponents(Site(config, str(tmp_path), "fused"), handle)
    starting._seen = StartState(("router",), ("worker-0",), loaded)
    assert starting._loading() == f"worker-0 (0 of 1 process ready) to load {said}"
    starting._seen = StartState(("router",), ("worker-0",), 1.0, "compiling kernels for this processor (once)")
    assert starting._loading() == "worker-0: compiling kernels for this processor (once)"
