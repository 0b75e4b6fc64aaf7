"""Whose KV leaves the device when memory is short, and when it comes back."""
