"""The matmul kernel for scalar units of NVIDIA devices."""
