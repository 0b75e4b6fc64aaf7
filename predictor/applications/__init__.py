"""A forecaster that a server trains from nothing but its own traffic: lengths by application, no text kept."""
