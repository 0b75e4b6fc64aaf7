"""From a configuration to a running service: cluster, proxy, components."""
