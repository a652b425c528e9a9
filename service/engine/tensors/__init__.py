"""Resident tensors and shared regions."""
