"""Resumable streams: their logs, the replica that runs them, and the routes by which clients go on reading."""
