"""The log of finished requests and batches: SQLite by default, Redis by URL."""
