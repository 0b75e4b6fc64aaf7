"""Tables and pictures of the papers' pages, from rows that ``simulator.reproduce`` printed."""
