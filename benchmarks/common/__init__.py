"""What several benchmarks use: servers under load, streams, small models."""
