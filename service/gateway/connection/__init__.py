"""Bytes to HTTP and back."""
