"""What is known about output lengths: history, laws, and how far a predictor is trusted."""
