"""The model worker: its step loop, its ranks, and the token path to the ingress."""
