"""The components that decide: Router, Batcher, Scheduler, KV offload manager."""
