"""The path of one request, from its context to its report."""
