"""Batch mode: the rules that form batches and choose the next one."""
