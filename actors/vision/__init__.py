"""Turns pictures into the rows that workers read."""
