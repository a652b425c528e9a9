"""What runs a batch: torch on the CPU, or Triton kernels on a GPU."""
