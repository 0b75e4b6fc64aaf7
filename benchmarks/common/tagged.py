"""Finds every process of a server by a variable in its environment, whichever process has adopted it."""

from __future__ import annotations

import os
import time

import psutil

POLL_S = 0.05


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """The living processes whose environment sets ``variable`` to ``value``: descendants, adopted or not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until_gone(variable: str, value: str, timeout_s: float) -> list[psutil.Process]:
    """Waits for those processes to end; returns the ones that have not when the time is over."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_with(variable, value)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left
