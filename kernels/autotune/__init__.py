"""Measures and fits; nothing that serves imports it."""
