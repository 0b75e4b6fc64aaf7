"""From logits to tokens: adjustments, draws, log probabilities."""
