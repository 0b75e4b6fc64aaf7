"""Two tenants, one of which sends ten times the other's load: simulated, and live on an emulated device."""
