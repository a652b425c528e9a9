"""Readings of the device: memory, power, temperature, use."""
