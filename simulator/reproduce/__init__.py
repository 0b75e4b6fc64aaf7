"""Reproductions of published tables and figures: ``python -m simulator.reproduce NAME|--all [--json]``."""
