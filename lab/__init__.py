"""The laboratory: reproductions of papers, their pictures and documents, the training of the embedded models.

It may import every room; no room imports it, and the wheel does not hold it.
"""
