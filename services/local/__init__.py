"""A service in one process, without Ray and without HTTP: what Python programs, ``farsight chat`` and tests run."""
