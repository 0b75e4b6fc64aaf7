"""How the embedded vision model is made and judged."""
