"""The matmul kernel for small products."""
