"""Simulated replicas under virtual time: fleet, latency, records."""
