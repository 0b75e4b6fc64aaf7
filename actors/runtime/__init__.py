"""What every component needs: processes, names, calls between components, health and metrics."""
