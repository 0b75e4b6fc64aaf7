"""Placement by prefix, live, on emulated devices: ``python -m benchmarks.live_prefixes``."""
