"""Pipelines of several processes."""
