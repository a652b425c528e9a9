"""Compilation ahead of time, loading and self-test."""
