"""Which replica a request goes to."""
