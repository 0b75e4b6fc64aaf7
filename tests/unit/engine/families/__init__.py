"""Every family of models against its reference."""
