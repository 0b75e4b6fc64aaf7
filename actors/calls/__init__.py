"""What the components may be asked: one declaration for the caller, the wire and the handler."""
