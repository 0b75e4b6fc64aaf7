"""What the machine must offer, checked before anything starts: the port, and GPUs."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import socket
from collections.abc import Mapping

from farsight.core.config.load import FarsightConfig
from farsight.core.errors import ConfigError


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if the address cannot be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _unbound(host, port, error) from error


def _unbound(host: str, port: int, error: OSError) -> ConfigError:
    """The error of an address that cannot be bound, with what to do about it."""
    if error.errno == errno.EADDRINUSE:
        free = f"a port that no other program listens on ({error.strerror})"
        expected = f"{free}; end that program, or choose another port with --port"
    elif error.errno == errno.EACCES:
        expected = f"a port that this user may open, such as 8000 ({error.strerror})"
    else:
        return ConfigError("server.host", host, f"an address of this machine ({error.strerror})")
    return ConfigError("server.port", f"{host}:{port}", expected)


def check_gpus(config: FarsightConfig, resources: Mapping[str, float], where: str = "cluster") -> None:
    """Raises ConfigError unless each process that computes on a GPU can have its own GPU.

    Args:
        resources: The cluster's resources, as Ray counts them.
        where: What has these resources.
    """
    found = resources.get("GPU", 0)
    needed = config.model.replicas * config.model.num_ranks * config.gpus_per_rank
    if found >= needed:
        return
    gpus = f"{needed:g} {'GPU' if needed == 1 else 'GPUs'}"
    if config.engine.device == "cuda":
        raise ConfigError("engine.device", "cuda", f"cpu, or a {where} with {gpus}, not {found:g}")
    expected = f"{gpus} in the {where}, not {found:g}"
    raise ConfigError("actors.gpus_per_rank", config.actors.gpus_per_rank, expected)


def check_own_gpus(config: FarsightConfig) -> None:
    """Raises ConfigError unless this machine and its torch can compute on as many GPUs as the settings ask for.

    A worker finds that out as well, but only after the start of Ray and its own import of torch.
    """
    if config.engine.device != "cuda" or not config.model.replicas:
        return
    version = importlib.metadata.version("torch")
    if version.endswith("+cpu"):
        raise ConfigError("engine.device", "cuda", f"cpu (torch {version} was built without CUDA)")
    check_gpus(config, {"GPU": visible_gpus()}, "machine")


def visible_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may use; 0 without NVIDIA's driver.

    Asks the driver itself, because an import of torch takes seconds. ``CUDA_VISIBLE_DEVICES`` counts.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
