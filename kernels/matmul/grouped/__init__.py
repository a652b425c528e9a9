"""Unequal products in one launch."""
