"""Bytes in, bytes out: HTTP, formats, admission. Imports neither torch nor the engine."""
