"""Simulates what would have become of a request, in a process of its own: one question at a time, within bounds.

The kernel ends the process when a question has taken ``MOST_CPU_S`` of processor time, and refuses it memory beyond
``MOST_BYTES``. It writes no file, its environment holds no keys, and it keeps nothing from one question to the next.
"""

from __future__ import annotations

import threading

from farsight.core.child_process import (
    ChildLost,
    ChildStopped,
    LimitedChild,
    framed,
    limit_process,
    parent_stream,
    processor_time,
    receive,
)
from farsight.core.codec import decode, encode
from farsight.core.errors import FarsightError
from farsight.core.messages.log import WhatIfAnswer, WhatIfQuestion

MOST_CPU_S = 10.0
"""Processor time of one question."""

MOST_BYTES = 1 << 30
"""Memory of the process beyond what it has when it starts."""


class WhatIfProcess:
    """A child that is started with the first question and ends with this process. For one thread at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._child: LimitedChild | None = None

    def ask(self, question: WhatIfQuestion) -> WhatIfAnswer:
        """Blocks until the answer.

        Raises:
            FarsightError: It took too much time or memory, or its process was ended.
        """
        with self._turn:
            if self._child is None or self._child.has_ended:
                self._child = LimitedChild(__spec__.name, cpu_s=MOST_CPU_S)
            try:
                data = self._child.ask(encode(question))
            except (ChildStopped, ChildLost) as error:
                raise FarsightError(f"the simulation was stopped: {error}") from error
            return decode(data, WhatIfAnswer)

    def close(self) -> None:
        """Ends the child."""
        with self._turn:
            if self._child is not None:
                self._child.end()


def main() -> None:
    """``python -m farsight.services.api.pages.what_if_process SOCKET``"""
    from farsight.simulator.counterfactual import answer

    limit_process(MOST_BYTES)
    with parent_stream() as stream:
        while (asked := receive(stream)) is not None:
            try:
                with processor_time(MOST_CPU_S):
                    found = answer(decode(asked, WhatIfQuestion))
            except (FarsightError, MemoryError) as error:
                found = WhatIfAnswer(problem=str(error) or "it needs too much memory")
            stream.write(framed(encode(found)))
            stream.flush()


if __name__ == "__main__":
    main()
