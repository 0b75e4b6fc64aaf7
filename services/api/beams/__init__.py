"""What clients ask for of beam search."""
