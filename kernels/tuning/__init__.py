"""Making a device's table by measuring: candidates, compiling them, timing them, and which of them are worth keeping."""
