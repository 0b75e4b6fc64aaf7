"""What one step may carry."""
