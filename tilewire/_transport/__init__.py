"""Bytes on their way: what is sent, over which connections, and when it is sent again."""
