"""Presets side by side on live pieces and emulated devices: ``python -m benchmarks.live_presets``."""
