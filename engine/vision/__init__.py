"""From pixels to the rows that a decoder reads in place of a prompt's placeholder tokens.

``geometry`` (no torch) says how many tokens an image has and prepares its pixels, ``model`` computes the rows, and
``spans`` puts them into a step.
"""
