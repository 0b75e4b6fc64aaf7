"""Orders: the rank in which a replica runs its requests."""
