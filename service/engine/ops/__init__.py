"""How each op computes on the CPU and on the GPU."""
