"""Presets side by side on a model that computes, with another server beside them on the same arrivals."""
