"""Hostile clients and peers of a whole server."""
