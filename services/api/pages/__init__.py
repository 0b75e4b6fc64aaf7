"""Pages for operators and users: dashboards, metrics, explanations."""
