"""Which requests that are on a replica go to another one, and why."""
