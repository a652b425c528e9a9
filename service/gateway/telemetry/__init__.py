"""Metrics, exemplars and spans of a gateway."""
