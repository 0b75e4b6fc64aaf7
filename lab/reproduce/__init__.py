"""Reproductions of published tables and figures: ``python -m lab.reproduce NAME|--all [--json]``."""
