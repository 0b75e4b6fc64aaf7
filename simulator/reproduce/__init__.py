"""Published tables and figures, run again: ``python -m simulator.reproduce NAME|--all [--json]``."""
