"""What a client gets back: whole replies, streams, log probabilities."""
