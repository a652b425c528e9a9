"""Descriptors in, results out: one process owns one device. Never sees HTTP."""
