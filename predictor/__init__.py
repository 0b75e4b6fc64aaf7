"""Forecasts of output lengths, learnt from finished requests. No Ray."""
