"""Tables and pictures of the papers' pages, from rows that ``lab.reproduce`` printed."""
