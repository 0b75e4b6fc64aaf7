"""Attention over the paged KV pool, and how a step is laid out for it."""
