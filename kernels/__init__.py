"""Triton kernels for matmul, softmax and add: tensors in, tensors out. Knows neither HTTP nor the service."""
