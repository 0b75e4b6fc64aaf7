"""Pages for people: dashboards, metrics, explanations."""
