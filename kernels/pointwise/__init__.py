"""Functions of one or two tensors, element by element."""
