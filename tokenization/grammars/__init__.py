"""Grammars that an output must follow: from what clients write to the tokens that may come next."""
