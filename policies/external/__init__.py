"""The scheduler of a replica that is another server, and its circuit breaker."""
