"""The registry of ops."""
