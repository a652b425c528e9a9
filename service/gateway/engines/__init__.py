"""Connections to engines, and the choice among them."""
