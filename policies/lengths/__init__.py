"""Output lengths: history, laws, and the weight given to a predictor."""
