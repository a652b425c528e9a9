"""Native routes."""
