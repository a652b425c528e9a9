"""Moving the operands of a batch between host slots and one device buffer, in one launch each way."""
