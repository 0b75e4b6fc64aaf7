"""In which order a replica runs its requests."""
