"""Beam search over the requests of a backend."""
