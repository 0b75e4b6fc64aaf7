"""Child processes of an ingress replica, each on an anonymous socket: frames of a length in 4 bytes and msgpack."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping

LENGTH = struct.Struct(">I")
"""What stands before a frame."""


def start_child(
    module: str, *args: str, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs ``python -m MODULE ARGS... SOCKET``; no other process has an end of the socket.

    Args:
        environment: In place of this process's own. The child imports what this process can.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        own = {**(os.environ if environment is None else environment)}
        own["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", module, *args, str(number)]
        return subprocess.Popen(command, pass_fds=(number,), env=own), ours


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data
