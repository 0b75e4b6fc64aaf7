"""Parts of the documentation that are generated from the code: ``python -m tools.reference`` writes them."""
