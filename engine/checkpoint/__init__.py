"""What a model directory says and holds: configuration, architecture, weights."""
