"""What the server returns to a client: whole replies, streams, log probabilities."""
