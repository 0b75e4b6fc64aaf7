"""What arrives: traces, arrivals, lengths, shared prefixes, workloads."""
