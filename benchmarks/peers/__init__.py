"""Farsight beside other servers, on the same model and under the same load."""
