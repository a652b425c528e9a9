"""The matmul kernel for small products, with its tiles."""
