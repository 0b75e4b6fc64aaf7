"""Measurements of Farsight: random models, seeded workloads, the engine alone, and a server under load."""
