"""The budget of prompt tokens of one step."""
