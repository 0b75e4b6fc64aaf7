"""Composition root, HTTP ingress and command line."""
