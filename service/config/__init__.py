"""Settings, parsers, slices for each process, and checks before the start."""
