"""The backend of a GPU."""
