"""How batch mode forms batches and which batch runs next."""
