"""Judges whether a process or a step makes progress: thread clocks, time bounds, verdicts. No Ray."""
