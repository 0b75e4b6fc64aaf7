"""Simulates the policies in virtual time: an event heap drives the same objects that serve live. No Ray, no torch."""
