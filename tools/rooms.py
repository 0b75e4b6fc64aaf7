"""The rooms of the house, in the order of its layers, and where they are."""

from __future__ import annotations

from pathlib import Path

ROOMS = (
    "core",
    "tokenization",
    "kvcache",
    "policies",
    "predictor",
    "estimator",
    "engine",
    "actors",
    "simulator",
    "services",
)
HOME = Path(__file__).parents[1]
