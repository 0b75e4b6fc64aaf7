"""Embeddings, scores and rankings: what a model makes of texts without generating any."""
