"""In the place of an agent of Ray that nothing here asks for anything: lives as long as its raylet, and does nothing.

A raylet ends with its agents, so there must be a process. Ray's own ones take seconds of a start and 60 to 90 MiB each.
The raylet starts this file as a program; it imports no package, so that it costs nothing.
"""

import os
import time

_LOOK_S = 2.0

if __name__ == "__main__":
    raylet = os.getppid()
    while os.getppid() == raylet:
        time.sleep(_LOOK_S)
