"""Commands: one file a command."""
