"""Which components should be alive, and how many: the Supervisor and its autoscaler."""
