"""Incoming requests: traces, arrivals, lengths, shared prefixes, workloads."""
