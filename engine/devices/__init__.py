"""What computes steps: the CPU, a GPU, an emulated device."""
