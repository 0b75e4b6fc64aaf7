"""One step: which backend computes it, recorded decode steps, and what happens when memory is short."""
