"""What a step costs in time, learned from measured steps. No Ray."""
