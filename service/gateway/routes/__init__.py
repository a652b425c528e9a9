"""HTTP verbs only: each module is one group of routes."""
