"""The clients: what can be called, for both, and how each of them sends."""
