"""Processes: start, restart, drain; what outlives an engine."""
