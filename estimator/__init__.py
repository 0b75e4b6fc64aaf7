"""What a step costs in time, learnt from measured steps. No Ray."""
