"""The matmul kernel for Hopper."""
