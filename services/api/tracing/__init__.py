"""OpenTelemetry: one span for each request that is sampled, with the decisions about it as events."""
