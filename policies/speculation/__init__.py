"""Which tokens are guessed ahead for a request, and whether a step verifies them."""
