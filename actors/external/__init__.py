"""Replicas that are other OpenAI-compatible servers: what stands before them."""
