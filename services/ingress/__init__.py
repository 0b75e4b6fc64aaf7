"""The ingress: the Ray Serve deployment, open requests, streams on their way to clients."""
