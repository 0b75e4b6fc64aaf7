"""Load generator for OpenAI-compatible servers: ``farsight bench``."""
