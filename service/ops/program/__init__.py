"""Programs: several ops in one request, and the op `program` that runs them."""
