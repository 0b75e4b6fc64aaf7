"""The fields of requests that concern tools: which there are, which are to be called, and calls of earlier turns."""
