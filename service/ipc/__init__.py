"""What crosses process borders: messages, their link, shared memory."""
