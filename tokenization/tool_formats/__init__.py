"""How models write tool calls and reasoning: one description for each family gives its grammar and its parser."""
