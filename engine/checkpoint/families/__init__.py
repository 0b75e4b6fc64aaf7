"""Families of models: one declarative record each."""
