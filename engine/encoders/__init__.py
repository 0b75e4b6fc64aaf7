"""Encoders that read texts: vectors for the length predictor, and its fine-tuned regressor."""
