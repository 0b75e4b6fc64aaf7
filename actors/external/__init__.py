"""Replicas that are external OpenAI-compatible servers: the component that represents each of them."""
