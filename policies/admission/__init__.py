"""Which waiting requests may start, given the KV memory that is there or will be."""
