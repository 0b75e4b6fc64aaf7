"""Forecasts of output lengths, learned from finished requests. No Ray."""
