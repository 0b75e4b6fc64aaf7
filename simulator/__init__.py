"""The policies under virtual time: an event heap drives the very objects that serve live. No Ray, no torch."""
