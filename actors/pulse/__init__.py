"""Whether a process or a step makes progress: clocks, bounds, and the judgement; no Ray, no clock of its own."""
