"""The OpenAI-compatible HTTP layer. It knows tokens and text, and reaches the model through ``backend`` alone."""
