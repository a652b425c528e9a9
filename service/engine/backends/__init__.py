"""Runs batches: torch on the CPU, or Triton kernels on a GPU."""
