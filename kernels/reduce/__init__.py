"""Reductions along one axis or over all elements."""
