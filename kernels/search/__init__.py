"""Exact nearest-neighbour search: a product and its k best columns."""
