"""Pictures in messages, and the places that they take in a prompt."""
