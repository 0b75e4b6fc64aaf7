"""Admission: which waiting requests may start, given present or predicted KV memory."""
