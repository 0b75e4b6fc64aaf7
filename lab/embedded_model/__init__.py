"""How the embedded default model is made: its tasks, its tokenizer, its training and its evaluation."""
