"""Counters, statistics and the log, for every process."""
