"""Stands in for the agent of Ray's dashboard, which nothing here asks: lives as long as its raylet, and does nothing.

A raylet ends when this agent ends, so there must be a process. Ray's own takes seconds of a start and 60 to 90 MiB.
The raylet starts this file as a program; it imports no package, so that it costs nothing.
"""

import os
import time

_LOOK_S = 2.0

if __name__ == "__main__":
    raylet = os.getppid()
    while os.getppid() == raylet:
        time.sleep(_LOOK_S)
