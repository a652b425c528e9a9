"""Messages between processes, their link, shared memory."""
