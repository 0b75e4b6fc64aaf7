"""The old command of the reproductions, which says where they are."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    words = " ".join(["python -m lab.reproduce", *sys.argv[1:]])
    sys.exit(f"the reproductions are in the laboratory, in a checkout of Farsight: {words}")
