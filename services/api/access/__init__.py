"""The front door: keys, roles, tenants' limits, hosts and origins."""
