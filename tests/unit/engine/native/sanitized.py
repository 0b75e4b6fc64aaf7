"""A plugin of pytest: what the tests compile of ``engine/native`` gets sanitizers (``make test-sanitized``).

``pytest -p tests.unit.engine.native.sanitized``, with the kinds in ``FARSIGHT_SANITIZE`` as the compiler names them, as
in ``address,undefined``. Python itself is not built with them, so their library comes by ``LD_PRELOAD``; a run without
it ends before the first test. The first finding ends the process.
"""

from __future__ import annotations

import ctypes
import os

import pytest

from farsight.engine.native import library

SYMBOLS = {"address": "__asan_init", "thread": "__tsan_init", "undefined": "__ubsan_handle_out_of_bounds"}
"""What the library of each kind brings."""


def pytest_configure() -> None:
    """Changes the flags before a test compiles anything; the compiled step gets another name by that.

    Raises:
        UsageError: a kind is not known, or its library is not loaded.
    """
    kinds = [kind for kind in os.environ.get("FARSIGHT_SANITIZE", "").split(",") if kind]
    loaded = ctypes.CDLL(None)
    for kind in kinds or ["nothing"]:
        if kind not in SYMBOLS:
            raise pytest.UsageError(f"FARSIGHT_SANITIZE: got {kind}, expected some of {', '.join(SYMBOLS)}")
        if kind != "undefined" and not hasattr(loaded, SYMBOLS[kind]):
            raise pytest.UsageError(f"FARSIGHT_SANITIZE: the library for {kind} is not in LD_PRELOAD")
    library.COMPILE_FLAGS[:] = [flag for flag in library.COMPILE_FLAGS if flag != "-O3"] + [
        "-O1",
        "-g",
        f"-fsanitize={','.join(kinds)}",
        "-fno-sanitize-recover=all",
        "-fno-omit-frame-pointer",
    ]


LEFT_OUT = {
    "test_team[refused]": "a sanitizer needs terabytes of addresses, and this test limits them",
    "test_a_matrix_that_fits_nowhere": "a sanitizer ends the process where memory is asked for that no machine has",
}
LEFT_OUT_OF_THREAD = {
    "test_team[leaves_no_thread]": "the sanitizer for data races has a thread of its own",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out tests of what a sanitizer itself cannot bear."""
    races = "thread" in os.environ.get("FARSIGHT_SANITIZE", "")
    left_out = LEFT_OUT | LEFT_OUT_OF_THREAD if races else LEFT_OUT
    for item in items:
        for name, reason in left_out.items():
            if item.name == name or item.name.startswith(f"{name}["):
                item.add_marker(pytest.mark.skip(reason=reason))
