"""The KV pool's tensors, and copies of blocks between device and host."""
