"""Mean and tail of the boosted order."""
