"""GGUF files: their header, read with bounds, and the tokenizer that it describes."""
