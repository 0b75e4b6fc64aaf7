"""Presets side by side on live components and emulated devices: ``python -m benchmarks.live_presets``."""
