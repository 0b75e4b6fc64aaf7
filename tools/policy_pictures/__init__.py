"""Draws the pictures of ``docs/policies``: ``python -m tools.policy_pictures [NAME ...]``."""
