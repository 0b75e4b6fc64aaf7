"""What one decision of each policy costs: ``python -m benchmarks.decisions [NAME ...] [--json]``."""
