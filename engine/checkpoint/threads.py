"""How many threads torch takes for an operation on a tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 1 << 22
"""Values up to which one thread computes alone."""


@contextmanager
def threads_for(num_values: int) -> Iterator[None]:
    """One thread for an operation on a few values, all of them otherwise.

    An operation that threads share ends with the last of them, and on a busy machine that one waits for a time slice. A
    mixture of experts has thousands of small tensors: with 4 threads on 4 busy cores a model of 111 million parameters
    was not loaded within a minute; with one thread it takes a second.
    """
    threads = torch.get_num_threads()
    if threads == 1 or num_values > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
