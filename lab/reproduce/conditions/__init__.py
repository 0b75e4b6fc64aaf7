"""What decides a printed figure: one condition of a reproduction changed at a time, three seeds each."""
