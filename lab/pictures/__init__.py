"""Draws the pictures of ``docs/policies``: ``python -m lab.pictures [NAME ...]``."""
