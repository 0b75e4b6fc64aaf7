"""What tenants may take, and who is served next among them."""
