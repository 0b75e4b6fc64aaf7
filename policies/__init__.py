"""Pure decisions, one file each, and the state machines that compose them. No clock, no I/O, no Ray, no torch."""
