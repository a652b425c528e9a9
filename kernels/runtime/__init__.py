"""Launches, driver, targets, layouts."""
