"""When requests will end: the replica's state rolled forward under its own order, and corrected by the ends seen."""
