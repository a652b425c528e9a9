"""Computes each op on the CPU and on the GPU."""
