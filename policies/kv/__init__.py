"""KV policies: which jobs' KV leaves the device when memory is short, and when it returns."""
